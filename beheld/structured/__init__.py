"""Grammars of answers, as state machines of llguidance; on the host, without tensors."""
