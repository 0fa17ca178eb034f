"""Executors: they run the model's plans, in this process or elsewhere."""
