"""Marks in a text that comes in pieces: what lies before, between and after them."""

from __future__ import annotations


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
