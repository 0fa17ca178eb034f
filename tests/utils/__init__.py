"""Tests of beheld.utils."""
