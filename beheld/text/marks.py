"""Finds marks, delimiters such as <tool_call>, in a text that arrives in pieces, for any division into pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

# Longer texts are processed in blocks, so that the rest of a text is not copied and searched after each of its marks.
BLOCK = 4096


def held_back(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may be the beginning of `mark`."""
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0:
        if mark.startswith(text[place:]):
            return len(text) - place
        place = text.find(mark[0], place + 1)
    return 0


class Seeker:
    """Finds the first of several marks. The time is linear in the text for any number of pieces."""

    def __init__(self) -> None:
        self._held = ""

    def seek(self, text: str, marks: Collection[str]) -> tuple[str, str | None, str]:
        """Add text; returns (the certain text before the mark, the mark or None, the text after it)."""
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
        """The text held back when the input ends: it is not a mark."""
        held, self._held = self._held, ""
        return held


class Trimmed:
    """Text without trailing whitespace, which is known only when something follows."""

    def __init__(self) -> None:
        self._blanks: list[str] = []

    def push(self, text: str) -> str:
        """Add text; returns what is certain."""
        solid = text.rstrip()
        if not solid:
            self._blanks.append(text)
            return ""
        shown = "".join([*self._blanks, solid])
        self._blanks = [text[len(solid) :]]
        return shown

    def rest(self) -> str:
        """Return and forget the whitespace held back."""
        held, self._blanks = "".join(self._blanks), []
        return held


class Enclosed:
    """Words around marked parts: the marks that enclose a part are left out, and so is whitespace before it.

    Args:
        pairs: marks that may stand before a part, in any number, and the mark that closes each; None for one that
            nothing closes. Behind a part stand as many closing marks as were opened, or one.
    """

    # Longer whitespace and marks are words. Each push looks at no more.
    MOST = 64

    def __init__(self, pairs: Mapping[str, str | None] = MappingProxyType({})) -> None:
        self._opens = tuple(pairs)
        self._pairs = pairs
        self._closes = tuple(dict.fromkeys(mark for mark in pairs.values() if mark is not None))
        self._held = ""
        # What closes the parts so far: how many marks may follow, and what looks for the next.
        self._left = 0
        self._closing: Beginning | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certain."""
        while self._closing is not None:
            found = self._closing.push(text)
            if found is None:
                return ""
            blanks, mark, rest = found
            self._left = self._left - 1 if mark else 0
            self._closing, text = self._next(), rest if mark else blanks + rest
        text = self._held + text
        place = self._opening(text, max(0, len(text) - self.MOST))
        self._held = text[place:]
        return text[:place]

    def part(self) -> None:
        """A part stands here: forget what opens it."""
        # Nothing stands between parts that follow one another: what encloses the first encloses all.
        self._left = max(self._left, self._opened(), 1 if self._closes else 0)
        self._held = ""
        self._closing = self._next()

    def rest(self) -> str:
        """Return and forget what is held back."""
        held, self._held = self._held, ""
        if self._closing is not None:
            held, self._closing, self._left = self._closing.rest() + held, None, 0
        return held

    def _next(self) -> Beginning | None:
        """Look for one more closing mark, if there may be one."""
        return Beginning(*self._closes) if self._left else None

    def _opened(self) -> int:
        """How many of the marks held back are to be closed."""
        count, text = 0, self._held.rstrip()
        while text:
            mark = max(filter(text.endswith, self._opens), key=len, default="")
            if not mark:
                break
            count += self._pairs[mark] is not None
            text = text.removesuffix(mark).rstrip()
        return count

    def _opening(self, text: str, least: int) -> int:
        """Where the marks and the whitespace at the end begin, or what may become a mark."""
        place = len(text) - max((held_back(text, mark) for mark in self._opens), default=0)
        while place > least:
            solid = len(text[least:place].rstrip()) + least
            marks = [mark for mark in self._opens if text.endswith(mark, least, solid)]
            if solid == place and not marks:
                break
            place = solid - max(map(len, marks), default=0)
        return max(place, least)


class Beginning:
    """Decides whether a text begins with one of several marks, after optional whitespace."""

    def __init__(self, *marks: str) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._blanks: list[str] = []
        self._head = ""

    def push(self, text: str) -> tuple[str, str, str] | None:
        """Add text; returns (whitespace, the mark or "", the rest) when decided, else None.

        Do not push after the decision.
        """
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
        """All of a text that ended before the decision."""
        return "".join(self._blanks) + self._head
