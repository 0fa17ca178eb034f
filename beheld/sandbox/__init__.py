"""Processes of our own and how they speak: frames without pickle, and workers that can be killed."""
