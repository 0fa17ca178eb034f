"""Splits a model's text into reasoning, between <think> and </think>, and answer."""

from __future__ import annotations

from collections.abc import Collection

from beheld.text.marks import Beginning, Seeker, Trimmed

OPEN = "<think>"
CLOSE = "</think>"
PARSERS = ("think",)


def begins_inside(prompt: str | None) -> bool:
    """True if the prompt ends with the opening tag, which some templates add."""
    return prompt is not None and prompt.rstrip().endswith(OPEN)


class ReasoningSplit:
    """Splits a text that arrives in pieces, for any division into pieces.

    Only reasoning at the very beginning counts; a later tag is ordinary text. Blank lines around the tags belong to
    neither part.

    Args:
        inside: the text begins inside the reasoning.
        calls: marks of tool calls, which end reasoning that was not closed: some models call a tool while they reason.
    """

    def __init__(self, *, inside: bool, calls: Collection[str] = ()) -> None:
        self._state = "thinking" if inside else "start"
        self._seeker = Seeker()
        self._thoughts = Trimmed()
        self._beginning = Beginning(OPEN)
        self._shown = False
        self._calls = frozenset(calls)

    @property
    def undecided(self) -> bool:
        """True while the text may still turn out to begin with the opening tag."""
        return self._state == "start"

    def push(self, text: str) -> tuple[str, str]:
        """Add text; returns the pieces that are now certain: (reasoning, answer)."""
        reasoning = ""
        if self._state == "start":
            text = self._begin(text)
        if self._state == "thinking":
            reasoning, text = self._think(text)
        return reasoning, self._answer(text) if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """The rest. Unclosed reasoning stays reasoning."""
        if self._state == "thinking":
            return self._trimmed_reasoning(self._seeker.rest()), ""
        rest = self._beginning.rest() if self._state == "start" else ""
        return "", rest

    def _begin(self, text: str) -> str:
        """Examine the beginning of the text; returns the unprocessed rest."""
        found = self._beginning.push(text)
        if found is None:
            return ""
        blanks, mark, rest = found
        if mark:
            self._state = "thinking"
            return rest
        self._state, self._shown = "answer", True
        return blanks + rest

    def _think(self, text: str) -> tuple[str, str]:
        """Returns (certain reasoning, unprocessed rest)."""
        before, mark, after = self._seeker.seek(text, (CLOSE, *self._calls))
        reasoning = self._trimmed_reasoning(before)
        if mark is None:
            return reasoning, ""
        self._state, self._shown = "answer", False
        return reasoning, mark + after if mark in self._calls else after

    def _trimmed_reasoning(self, text: str) -> str:
        """Reasoning without surrounding whitespace; trailing whitespace may turn out to precede the closing tag."""
        if not self._shown:
            text = text.lstrip()
        self._shown = self._shown or bool(text)
        return self._thoughts.push(text)

    def _answer(self, text: str) -> str:
        if not self._shown:
            text = text.lstrip()
        self._shown = self._shown or bool(text)
        return text
