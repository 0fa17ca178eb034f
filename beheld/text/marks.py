"""Marks in a text that comes in pieces: what lies before, between and after them, however the text is cut."""

from __future__ import annotations

from collections.abc import Collection


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
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


class Beginning:
    """Whether a text begins with one of some marks, blanks before it aside."""

    def __init__(self, *marks: str) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._blanks: list[str] = []
        self._head = ""

    def push(self, text: str) -> tuple[str, str, str] | None:
        """(blanks, the mark or nothing, what follows); None while it is open, and nothing is pushed after that."""
        text = self._head + text
        if not self._head:
            solid = text.lstrip()
            self._blanks.append(text[: len(text) - len(solid)])
            text = solid
        if not text or any(len(mark) > len(text) and mark.startswith(text) for mark in self._marks):
            self._head = text
            return None
        mark = next(filter(text.startswith, self._marks), "")
        return "".join(self._blanks), mark, text[len(mark) :]

    def rest(self) -> str:
        """All of a text that ended while it was open."""
        return "".join(self._blanks) + self._head
