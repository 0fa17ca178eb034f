"""Tests of beheld.parallel."""
