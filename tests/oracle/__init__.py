"""The oracle: our greedy answers against those of transformers."""
