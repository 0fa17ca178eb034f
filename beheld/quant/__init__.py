"""Quantization methods: weights stored in fewer bits than they are computed in."""
