"""Tests of pooling."""
