"""Tests of beheld.api."""
