"""Calls between <tool_call> and </tool_call>, as Hermes and Qwen models write them."""

from __future__ import annotations

from beheld.text.marks import held_back
from beheld.text.tools.call import Call, call_of

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesReader:
    """Text outside the marks is shown at once; what is between them is held until it is complete."""

    def __init__(self) -> None:
        self._held = ""
        self._inside: list[str] | None = None
        self._tail = ""
        self._called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """What has become certain."""
        shown: list[str] = []
        calls: list[Call] = []
        while text:
            text = self._within(text, shown, calls) if self._inside is not None else self._outside(text, shown)
        return "".join(shown), calls

    def finish(self) -> tuple[str, list[Call]]:
        """The rest; a call that lacks only its closing mark is a call."""
        if self._inside is None:
            rest, self._held = self._held, ""
            return ("" if self._called and not rest.strip() else rest), []
        body = "".join(self._inside)
        self._inside = None
        call = call_of(body)
        return (OPEN + body, []) if call is None else ("", [call])

    def _outside(self, text: str, shown: list[str]) -> str:
        """Take text up to the next opening mark; returns what is left to look at."""
        text = self._held + text
        self._held = ""
        place = text.find(OPEN)
        if place < 0:
            keep = held_back(text, OPEN)
            # Blanks may turn out to stand between two calls, or before one.
            certain = len(text[: len(text) - keep].rstrip())
            shown.append(text[:certain])
            self._held = text[certain:]
            return ""
        before = text[:place]
        if before.strip():
            shown.append(before.rstrip())
        self._inside, self._tail = [], ""
        return text[place + len(OPEN) :]

    def _within(self, text: str, shown: list[str], calls: list[Call]) -> str:
        """Take text up to the closing mark; returns what is left to look at."""
        assert self._inside is not None
        # A closing mark may lie across the border of two pieces, so a little of the last one is looked at again.
        window = self._tail + text
        place = window.find(CLOSE)
        if place < 0:
            self._inside.append(text)
            self._tail = window[-(len(CLOSE) - 1) :]
            return ""
        end = place + len(CLOSE) - len(self._tail)
        body = ("".join(self._inside) + text[:end])[: -len(CLOSE)]
        self._inside = None
        call = call_of(body)
        if call is None:
            shown.append(OPEN + body + CLOSE)
        else:
            calls.append(call)
            self._called = True
        return text[end:]
