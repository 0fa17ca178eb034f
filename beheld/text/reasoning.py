"""Thoughts and answer told apart, as models write them between <think> and </think>."""

from __future__ import annotations

from beheld.text.marks import held_back

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
        self._held = ""
        self._shown = False

    def push(self, text: str) -> tuple[str, str]:
        """The pieces that have become certain: (of the thoughts, of the answer)."""
        self._held += text
        thoughts = ""
        if self._state == "start":
            self._begin()
        if self._state == "thinking":
            thoughts = self._think()
        return thoughts, self._answer() if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """The rest. Thoughts that never ended are thoughts."""
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self._state == "thinking" else ("", rest)

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._state, self._held = "thinking", text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._state, self._shown = "answer", True

    def _think(self) -> str:
        if not self._shown:
            self._held = self._held.lstrip()
        place = self._held.find(CLOSE)
        if place >= 0:
            thoughts, self._held = self._held[:place].rstrip(), self._held[place + len(CLOSE) :]
            self._state, self._shown = "answer", False
            return thoughts
        # Blanks may turn out to stand before the closing mark.
        certain = len(self._held[: len(self._held) - held_back(self._held, CLOSE)].rstrip())
        thoughts, self._held = self._held[:certain], self._held[certain:]
        self._shown = self._shown or bool(thoughts)
        return thoughts

    def _answer(self) -> str:
        if not self._shown:
            self._held = self._held.lstrip()
        text, self._held = self._held, ""
        self._shown = self._shown or bool(text)
        return text
