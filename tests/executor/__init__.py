"""Tests of beheld.executor."""
