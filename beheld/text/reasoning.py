"""Thoughts and answer told apart, as models write them between <think> and </think>."""

from __future__ import annotations

from beheld.text.marks import Beginning, Seeker, Trimmed

OPEN = "<think>"
CLOSE = "</think>"
PARSERS = ("think",)


def begins_inside(prompt: str | None) -> bool:
    """True if the prompt has opened the thoughts already, as some templates do."""
    return prompt is not None and prompt.rstrip().endswith(OPEN)


class ReasoningSplit:
    """Splits a text that comes in pieces; how it is cut does not matter.

    Only thoughts at the very beginning count; a mark later in the text is text. Blank lines around the marks belong
    to neither part.

    Args:
        inside: the text begins within the thoughts.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state = "thinking" if inside else "start"
        self._seeker = Seeker()
        self._thoughts = Trimmed()
        self._beginning = Beginning(OPEN)
        self._shown = False

    def push(self, text: str) -> tuple[str, str]:
        """The pieces that have become certain: (of the thoughts, of the answer)."""
        thoughts = ""
        if self._state == "start":
            text = self._begin(text)
        if self._state == "thinking":
            thoughts, text = self._think(text)
        return thoughts, self._answer(text) if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """The rest. Thoughts that never ended are thoughts."""
        if self._state == "thinking":
            return self._thought(self._seeker.rest()), ""
        rest = self._beginning.rest() if self._state == "start" else ""
        return "", rest

    def _begin(self, text: str) -> str:
        """Find out what the text begins with; returns what is left to look at."""
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
        """(thoughts that are certain, what is left to look at)."""
        before, mark, after = self._seeker.seek(text, (CLOSE,))
        thoughts = self._thought(before)
        if mark is None:
            return thoughts, ""
        self._state, self._shown = "answer", False
        return thoughts, after

    def _thought(self, text: str) -> str:
        """Thoughts without blanks around them: those at the end may turn out to stand before the closing mark."""
        if not self._shown:
            text = text.lstrip()
        self._shown = self._shown or bool(text)
        return self._thoughts.push(text)

    def _answer(self, text: str) -> str:
        if not self._shown:
            text = text.lstrip()
        self._shown = self._shown or bool(text)
        return text
