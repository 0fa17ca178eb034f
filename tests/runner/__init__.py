"""Tests of beheld.runner."""
