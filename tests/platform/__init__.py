"""Tests of beheld.platform."""
