"""Model families: one folder each, which holds all that is known of it."""
