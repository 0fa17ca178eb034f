"""Grammars that answers must follow, as state machines over llguidance; on the host, in integers."""
