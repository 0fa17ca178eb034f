"""Tests of beheld.attention."""
