"""Checkpoints as they lie on disk."""
