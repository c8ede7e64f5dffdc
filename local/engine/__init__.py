"""The processes of one SGLang server: how they are started, bound to their parent, and ended."""
