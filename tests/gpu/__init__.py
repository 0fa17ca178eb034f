"""Tests that need an NVIDIA GPU; they skip where there is none."""
