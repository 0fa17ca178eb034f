"""Reads calls after a mark, each with its own kind of body; the surrounding text is passed on at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from beheld.text.marks import BLOCK, Beginning, Seeker, Trimmed
from beheld.text.tools.call import CallBody, Piece


@dataclass(frozen=True)
class Region:
    """The part of a text that an opening mark starts.

    Attributes:
        close: the mark that ends it; if it is also an opening mark, the next region begins with it.
        given: text that the body gets first.
        quotes: marks between which no other mark counts.
    """

    close: str
    given: str = ""
    quotes: tuple[str, str] | None = None


class MarkedReader:
    """Reads regions between marks; see call.ToolReader.

    Args:
        regions: opening mark -> region.
        body: makes the reader of one region.
        stray: a mark that is ignored after a call and is text before the first.
        frame: the marks around all calls, which are ignored. Between them, only calls are meant: what else stands there
            is text only if there is no call.
        blanks: whether whitespace between words and the first mark belongs to the words, as templates write it again.
        verbatim: whether all whitespace around calls belongs to the words.
        echoes: whether a call's text that the model repeats after it, with the closing mark, is left out.
    """

    def __init__(
        self,
        regions: Mapping[str, Region],
        body: Callable[[], CallBody],
        stray: str | None = None,
        frame: Sequence[str] = (),
        *,
        blanks: bool = False,
        verbatim: bool = False,
        echoes: bool = False,
    ) -> None:
        self._regions = regions
        self._make = body
        self._frame = frame
        # Text within the frame before the next call, while that is open.
        self._noise: list[str] | None = None
        self._strays = () if stray is None else (stray,)
        self._marks = (*regions, *self._strays, *frame)
        self._seeker = Seeker()
        self._words = Trimmed()
        # The open region: its body, its opening mark and the region.
        self._open: tuple[CallBody, str, Region] | None = None
        self._quoted = False
        # The opening mark and the whitespace before it; they are text if no call follows.
        self._undecided = ""
        self._spelled = False
        self._called = False
        # Whitespace before the next mark belongs to the words that were said.
        self._keeps = blanks
        self._verbatim = verbatim
        self._said = False
        # The text of the open region, and what decides whether it stands again after it.
        self._region: list[str] | None = [] if echoes else None
        self._echo: Beginning | None = None

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
            self._add(rest if self._echo is None else self._echo.rest(), shown)
            self._say(self._noise_so_far(), shown)
        else:
            body, _, _ = self._open
            self._take(body, body.push(rest), shown, pieces)
            self._take(body, body.cut(), shown, pieces)
            self._say(self._undecided, shown)
        blanks = self._words.rest()
        return "".join([*shown, "" if self._called else blanks]), pieces

    def _outside(self, text: str, shown: list[str], pieces: list[Piece]) -> str:
        """Consume text up to the next mark; returns the unprocessed rest."""
        if self._echo is not None:
            found = self._echo.push(text)
            if found is None:
                return ""
            blanks, echo, rest = found
            self._echo = Beginning(echo) if echo else None
            return rest if echo else blanks + rest
        before, mark, after = self._seeker.seek(text, self._marks)
        self._add(before, shown)
        if mark is not None and self._keeps and self._said:
            shown.append(self._words.rest())
        self._keeps = self._keeps and mark is None
        if mark is not None and mark in self._regions:
            self._enter(mark, shown, pieces)
        elif mark in self._frame:
            self._say(self._noise_so_far(), shown)
            self._noise = [] if mark == self._frame[0] else None
        elif mark is not None and not self._called:
            self._say(mark, shown)
        return after

    def _add(self, text: str, shown: list[str]) -> None:
        if self._noise is None:
            self._say(text, shown)
        else:
            self._noise.append(text)

    def _noise_so_far(self) -> str:
        """The text within the frame, which is shown if there is no call."""
        text = "" if self._called or self._noise is None else "".join(self._noise)
        self._noise = None if self._noise is None else []
        return text

    def _enter(self, mark: str, shown: list[str], pieces: list[Piece]) -> None:
        region = self._regions[mark]
        body = self._make()
        self._open = body, mark, region
        # If the body reads the mark itself, the mark must not appear twice.
        self._undecided = self._words.rest() + self._noise_so_far() + mark.removesuffix(region.given)
        self._spelled = False
        self._take(body, body.push(region.given), shown, pieces)

    def _within(self, text: str, shown: list[str], pieces: list[Piece]) -> str:
        """Consume text up to the closing mark; returns the unprocessed rest.

        Some models forget that mark, or write the opening one without a call: a region also ends where its opening mark
        stands again, unless that is in a call's arguments.
        """
        assert self._open is not None
        body, opening, region = self._open
        close, begun, ended = region.close, *(region.quotes or ("", ""))
        marks = (ended,) if self._quoted else (close, opening, *((begun,) if begun else ()), *self._strays)
        before, mark, after = self._seeker.seek(text, marks)
        if self._region is not None:
            self._region.append(before)
        self._take(body, body.push(before), shown, pieces)
        if mark is None:
            return ""
        if mark in (region.quotes or ()):
            self._quoted = mark == begun
            if self._region is not None:
                self._region.append(mark)
            self._take(body, body.push(mark), shown, pieces)
            return after
        if mark in self._strays and mark != close and body.called and body.complete:
            return after
        if mark != close and (mark in self._strays or not body.complete):
            self._take(body, body.push(mark), shown, pieces)
            return after
        self._take(body, body.end(), shown, pieces)
        again = mark in self._regions
        if self._undecided or self._spelled:
            self._say(self._undecided + ("" if again else mark), shown)
        self._open, self._undecided = None, ""
        if self._region is not None:
            self._echo = Beginning("".join([*self._region, close])) if body.called and mark == close else None
            self._region.clear()
        if again:
            self._enter(mark, shown, pieces)
        return after

    def _take(self, body: CallBody, read: tuple[str, list[Piece]], shown: list[str], pieces: list[Piece]) -> None:
        words, found = read
        pieces += found
        if body.called:
            self._called, self._undecided = True, ""
        elif words:
            words, self._undecided, self._spelled = self._undecided + words, "", True
        self._say(words, shown)

    def _say(self, text: str, shown: list[str]) -> None:
        if text:
            if self._called and not self._said and not self._verbatim:
                text = text.lstrip()
            shown.append(text if self._verbatim else self._words.push(text))
            self._said = self._said or bool(shown[-1])
