"""A user's sampling parameters, checked and resolved."""
