"""Turns messages and media into requests, on the host, without weights or a GPU."""
