"""Reads calls in Gemma 4's format: call:name{key:<|"|>text<|"|>,other:[1,true]}; "call" may be missing."""

from __future__ import annotations

import re

from beheld.text.tools.call import NAME, Piece, json_text, parsed

_CALL = re.compile(r"\s*(?:call)?:?([^\s{:]+)(\{.*)", re.DOTALL)
_QUOTE = '<|"|>'
# A text between quotes, or a key or a text without.
_PART = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[A-Za-z_][\w.-]*)(?=\s*:)|(?P<word>[A-Za-z_][^,:{}\[\]<>"]*?)(?=\s*[,}\]])',
    re.DOTALL,
)
_JSON_WORDS = ("true", "false", "null")


class GemmaCall:
    """One call, which is passed on when it is complete; a call.CallBody."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self.called = False
        # It is read as a whole.
        self.complete = False

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody."""
        self._held.append(text)
        return "", []

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        return self._read(cut=False)

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody. Arguments that are cut off stay open, so that no one takes them for complete ones."""
        return self._read(cut=True)

    def _read(self, *, cut: bool) -> tuple[str, list[Piece]]:
        text, self._held = "".join(self._held), []
        found = _CALL.fullmatch(text)
        if found is None or not NAME.fullmatch(found[1]):
            return text, []
        arguments = _PART.sub(_as_json, found[2])
        try:
            arguments = json_text(parsed(arguments))
        except ValueError:
            if not cut:
                return text, []
            before, quote, begun = arguments.partition(_QUOTE)
            arguments = before + (json_text(begun)[:-1] if quote else "")
        self.called = True
        return "", [Piece(found[1], arguments)]


def _as_json(found: re.Match[str]) -> str:
    word = found.group() if found["text"] is None else found["text"]
    return word if found["word"] in _JSON_WORDS else json_text(word)
