"""Compares transformers and beheld on the same input, stage by stage; finds the first that differs, and by how much."""
