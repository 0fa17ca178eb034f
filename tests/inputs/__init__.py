"""Tests of the input pipeline."""
