"""Adapters that give every model the same interface to the runner."""
