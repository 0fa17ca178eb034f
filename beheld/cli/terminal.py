"""Text sanitizing for a terminal, in both directions."""

from __future__ import annotations


def shown(text: str) -> str:
    """Replace control characters, which could move the cursor or worse."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def whole(text: str) -> str:
    """Replace the surrogates that stand for bytes that are not UTF-8, so that the text can be sent."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
