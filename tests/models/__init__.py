"""Tests of beheld.models."""
