"""Every change to a loaded transformers model, as named operations that can be undone."""
