"""The engine: plan, run, update."""
