"""Benchmarks: each short, each able to compare beheld with vLLM and transformers."""
