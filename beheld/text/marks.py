"""Marks in a text that comes in pieces: what lies before, between and after them, however the text is cut."""

from __future__ import annotations

from collections.abc import Collection


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


class Seeker:
    """Looks for the first of some marks. Time is linear in the text, in however many pieces it comes."""

    def __init__(self) -> None:
        self._held = ""

    def seek(self, text: str, marks: Collection[str]) -> tuple[str, str | None, str]:
        """(text before the mark that is certain, the mark or None if none has come, what follows it)."""
        text = self._held + text
        self._held = ""
        found = min(((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=None)
        if found is not None:
            place, mark = found
            return text[:place], mark, text[place + len(mark) :]
        certain = len(text) - max((held_back(text, mark) for mark in marks), default=0)
        self._held = text[certain:]
        return text[:certain], None, ""

    def rest(self) -> str:
        """What was held back, at the end of the text: it is no mark."""
        held, self._held = self._held, ""
        return held


class Trimmed:
    """Text without the blanks at its end, which is known only when something follows."""

    def __init__(self) -> None:
        self._blanks: list[str] = []

    def push(self, text: str) -> str:
        """What is certain."""
        solid = text.rstrip()
        if not solid:
            self._blanks.append(text)
            return ""
        shown = "".join([*self._blanks, solid])
        self._blanks = [text[len(solid) :]]
        return shown

    def rest(self) -> str:
        """The blanks that are held; they are forgotten."""
        held, self._blanks = "".join(self._blanks), []
        return held
