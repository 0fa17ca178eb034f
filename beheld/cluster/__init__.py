"""Processes on other hosts: Ray starts them, and each connects back with a token."""
