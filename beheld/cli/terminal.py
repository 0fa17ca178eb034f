"""Text of others on a terminal."""

from __future__ import annotations


def shown(text: str) -> str:
    """Text that does nothing to a terminal: control characters could move its cursor, or worse."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
