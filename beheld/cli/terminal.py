"""Text on its way to a terminal, and from one."""

from __future__ import annotations


def shown(text: str) -> str:
    """Text that does nothing to a terminal: control characters could move its cursor, or worse."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def whole(text: str) -> str:
    """Text that can be sent: what was typed or piped in bytes that are no UTF-8 is marked as lost."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
