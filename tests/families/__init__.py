"""Tests of families: the registry, and a definition that transformers does not know."""
