"""The `midstream` command: it reads options, calls the layers below, and prints what they return."""
