"""Flags of the engine's options, for commands and for scripts."""
