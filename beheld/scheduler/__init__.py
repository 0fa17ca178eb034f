"""Who runs next, in integers."""
