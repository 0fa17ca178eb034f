"""Tests of the vllm module paths, and of the documents' scripts."""
