"""Transformers and beheld side by side on the same input: which stage differs first, and by how much."""
