"""midstream's configuration: Hydra groups (the YAML files here) and the typed schema that checks them."""
