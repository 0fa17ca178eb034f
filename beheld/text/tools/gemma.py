"""Reads calls in Gemma 4's format: call:name{key:<|"|>text<|"|>,other:[1,true]}."""

from __future__ import annotations

import re

from beheld.text.tools.call import NAME, Piece, json_text, parsed

_CALL = re.compile(r"\s*call:([^\s{]+)(\{.*\})\s*", re.DOTALL)
# A text between quotes, or a key without.
_PART = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[A-Za-z_][\w.-]*)(?=\s*:)', re.DOTALL)


class GemmaCall:
    """One call, which is passed on when it is complete; a call.CallBody."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.called = False

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        self._held.append(text)
        return "", []

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        text, self._held = "".join(self._held), []
        found = _CALL.fullmatch(text)
        if found is None or not NAME.fullmatch(found[1]):
            return text, []
        try:
            arguments = json_text(parsed(_PART.sub(_as_json, found[2])))
        except ValueError:
            return text, []
        self.called = True
        return "", [Piece(found[1], arguments)]

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        return self.end()


def _as_json(found: re.Match[str]) -> str:
    return json_text(found["key"] if found["text"] is None else found["text"])
