"""Model families, one folder each, with everything that is specific to the family."""
