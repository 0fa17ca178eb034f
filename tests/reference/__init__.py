"""Answers of other implementations to our tiny checkpoints, recorded once and compared in every run."""
