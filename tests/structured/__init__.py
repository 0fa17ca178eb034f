"""Tests of beheld.structured."""
