"""The engine: it plans, runs and updates."""
