"""Reads calls in Gemma 4's format: call:name{key:<|"|>text<|"|>,other:[1,true]}; "call" may be missing.

FunctionGemma has <escape> in place of quotes, and may have it around values of other types, too.

What stands between the marks after "call:" and has no bracket is a call without arguments, whatever its name: the marks
are special tokens, so the model meant a call, and a client that has no such function says so to the model.
"""

from __future__ import annotations

import re
from typing import Any

from beheld.text.tools.call import NAME, Piece, Schemas, WholeCall, json_text, parsed
from beheld.text.tools.tagged import typed
from beheld.utils.json_types import types_of

_CALL = re.compile(r"\s*(?:call)?:?([^\s{:]+)(\{.*)", re.DOTALL)
_BEGUN = re.compile(r"\s*(?:call)?:?[^\s{:]+\{")
# Of a text without blanks around it: a search that gives blanks back takes time that grows with their square.
_BARE = re.compile(r"(?:call)?:\s*+([^\s{}:<>][^{}:<>\n]{0,63})")
# Letters in which a call must begin.
_HEAD = 256
QUOTE, ESCAPE = '<|"|>', "<escape>"
# For each quote, a text between two of them, or all up to the next sign: every letter is read once.
_PARTS = {
    quote: re.compile(rf'{re.escape(quote)}(?P<text>.*?){re.escape(quote)}|[^,:{{}}\[\]<>"]++', re.DOTALL)
    for quote in (QUOTE, ESCAPE)
}
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_JSON_WORDS = ("true", "false", "null")


class GemmaCall(WholeCall):
    """One call.

    Args:
        quote: stands around texts.
        schemas: the functions' schemas, for texts that are values of other types.
    """

    def __init__(self, quote: str = QUOTE, schemas: Schemas | None = None) -> None:
        super().__init__()
        self._quote = quote
        self._schemas = schemas or {}
        self._head = ""

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody. What has begun is open."""
        if self.complete and len(self._head) < _HEAD:
            self._head += text[: _HEAD - len(self._head)]
            self.complete = _BEGUN.match(self._head) is None
        return super().push(text)

    def _read(self, text: str, *, cut: bool) -> Piece | None:
        bare = None if cut else _BARE.fullmatch(text.strip())
        if bare is not None:
            return Piece(bare[1], "{}")
        found = _CALL.fullmatch(text)
        if found is None or not NAME.fullmatch(found[1]):
            return None
        arguments = _PARTS[self._quote].sub(_as_json, found[2])
        try:
            arguments = json_text(self._typed(found[1], parsed(arguments)))
        except ValueError:
            if not cut:
                return None
            before, quote, begun = arguments.partition(self._quote)
            arguments = before + (json_text(begun)[:-1] if quote else "")
        return Piece(found[1], arguments)

    def _typed(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, with texts as their schemas want them."""
        properties = self._schemas.get(name, {}).get("properties")
        known = properties if isinstance(properties, dict) else {}
        return {
            key: parsed(typed(value, types_of(known[key]))) if isinstance(value, str) and key in known else value
            for key, value in given.items()
        }


def _as_json(found: re.Match[str]) -> str:
    """Return a part as JSON writes it: texts, keys and words in quotes, and all else as it is."""
    if found["text"] is not None:
        return json_text(found["text"])
    part = found.group()
    word, sign = part.strip(), found.string[found.end() : found.end() + 1]
    if sign == ":" and _KEY.fullmatch(word):
        return json_text(word)
    if sign and sign in ",}]" and (word[:1] == "_" or word[:1].isalpha()) and word not in _JSON_WORDS:
        return json_text(word)
    return part
