"""Checks and resolves a user's sampling parameters."""
