"""Leaves: small modules that every package may import and that import none."""
