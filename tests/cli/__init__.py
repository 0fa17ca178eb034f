"""Tests of beheld.cli."""
