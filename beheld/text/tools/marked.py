"""Calls behind a mark, each with a body of its own kind: the text around them is shown at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from beheld.text.marks import Seeker, Trimmed
from beheld.text.tools.call import CallBody, Piece

# Longer texts are taken in blocks, so that what is left of a text is not copied again behind each of its calls.
BLOCK = 4096


@dataclass(frozen=True)
class Region:
    """What begins with a mark.

    Attributes:
        close: the mark that ends it; if that opens a region too, the next one begins with it.
        given: what the body is given first.
    """

    close: str
    given: str = ""


class MarkedReader:
    """Reads regions between marks; see call.ToolReader.

    Args:
        regions: by the mark that opens them.
        body: makes the reader of one region.
        stray: a mark that means nothing behind a call, and is text before the first.
    """

    def __init__(self, regions: Mapping[str, Region], body: Callable[[], CallBody], stray: str | None = None) -> None:
        self._regions = regions
        self._make = body
        self._marks = (*regions, *(() if stray is None else (stray,)))
        self._seeker = Seeker()
        self._words = Trimmed()
        self._open: tuple[CallBody, str] | None = None
        # The opening mark and the blanks before it, which are text if no call follows.
        self._undecided = ""
        self._spelled = False
        self._called = False

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As ToolReader."""
        shown: list[str] = []
        pieces: list[Piece] = []
        for start in range(0, len(text), BLOCK):
            block = text[start : start + BLOCK]
            while block:
                block = (
                    self._outside(block, shown, pieces) if self._open is None else self._within(block, shown, pieces)
                )
        return "".join(shown), pieces

    def finish(self) -> tuple[str, list[Piece]]:
        """As ToolReader."""
        shown: list[str] = []
        pieces: list[Piece] = []
        rest = self._seeker.rest()
        if self._open is None:
            self._say(rest, shown)
        else:
            body, _ = self._open
            self._take(body, body.push(rest), shown, pieces)
            self._take(body, body.cut(), shown, pieces)
            self._say(self._undecided, shown)
        blanks = self._words.rest()
        return "".join([*shown, "" if self._called else blanks]), pieces

    def _outside(self, text: str, shown: list[str], pieces: list[Piece]) -> str:
        """Take text up to the next mark; returns what is left to look at."""
        before, mark, after = self._seeker.seek(text, self._marks)
        self._say(before, shown)
        if mark is not None and mark in self._regions:
            self._enter(mark, shown, pieces)
        elif mark is not None and not self._called:
            self._say(mark, shown)
        return after

    def _enter(self, mark: str, shown: list[str], pieces: list[Piece]) -> None:
        region = self._regions[mark]
        body = self._make()
        self._open = body, region.close
        # The body is told a mark that it reads itself; then that is not to be told twice.
        self._undecided = self._words.rest() + mark.removesuffix(region.given)
        self._spelled = False
        self._take(body, body.push(region.given), shown, pieces)

    def _within(self, text: str, shown: list[str], pieces: list[Piece]) -> str:
        """Take text up to the closing mark; returns what is left to look at."""
        assert self._open is not None
        body, close = self._open
        before, mark, after = self._seeker.seek(text, (close,))
        self._take(body, body.push(before), shown, pieces)
        if mark is None:
            return ""
        self._take(body, body.end(), shown, pieces)
        again = mark in self._regions
        if self._undecided or self._spelled:
            self._say(self._undecided + ("" if again else mark), shown)
        self._open, self._undecided = None, ""
        if again:
            self._enter(mark, shown, pieces)
        return after

    def _take(self, body: CallBody, told: tuple[str, list[Piece]], shown: list[str], pieces: list[Piece]) -> None:
        words, found = told
        pieces += found
        if body.called:
            self._called, self._undecided = True, ""
        elif words:
            words, self._undecided, self._spelled = self._undecided + words, "", True
        self._say(words, shown)

    def _say(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(self._words.push(text))
