"""Adapters that make any model look the same to the runner."""
