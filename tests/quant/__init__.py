"""Tests of beheld.quant."""
