"""Tests of beheld.engine."""
