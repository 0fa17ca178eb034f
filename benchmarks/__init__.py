"""Benchmarks: each short, each able to run vLLM and transformers beside beheld."""
