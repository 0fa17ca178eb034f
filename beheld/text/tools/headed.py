"""Reads calls with a header that names the function and JSON after it, as DeepSeek, Kimi and gpt-oss write them."""

from __future__ import annotations

import re

from beheld.text.tools.call import NAME, Piece
from beheld.text.tools.json_calls import Balance

# No header is longer: a name has 64 characters, and the longest mark about 30.
_MAX_HEADER = 256
# Kimi numbers its calls, and its template puts these ids into later prompts.
_KIMI = re.compile(
    r"\s*(?:(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)|(?:functions\.)?(?P<later>[^\s:<]+))\s*"
    r"<\|tool_call_argument_begin\|>\s*"
)
_HARMONY = re.compile(r"[^<]*\bto=(?:functions\.)?(?P<name>[^\s<]+)[^{]*<\|message\|>\s*")
# DeepSeek-V3 writes the call's type, then the name and a fence; later versions the name alone.
_DEEPSEEK = re.compile(
    r"\s*(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json\s*|(?P<later>[^\s<]+)<｜tool▁sep｜>\s*)"
)


class HeadedCall:
    """One call: a header up to the first bracket, then its arguments; a call.CallBody.

    Args:
        header: matches the whole header; its group "name" or "later" is the name, "id" the model's own id of the call.
    """

    def __init__(self, header: re.Pattern[str]) -> None:
        self._header = header
        self._state = "header"
        self._held = ""
        self._balance = Balance()

    @property
    def called(self) -> bool:
        """True once a call has begun."""
        return self._state in ("arguments", "done")

    @property
    def complete(self) -> bool:
        """As CallBody."""
        return self._state != "arguments"

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """As CallBody. Text after the arguments, such as the end of a fence, is left out."""
        pieces: list[Piece] = []
        if self._state == "header":
            self._held += text
            place = self._held.find("{")
            if place < 0 and len(self._held) <= _MAX_HEADER:
                return "", []
            text, self._held = self._held, ""
            found = self._header.fullmatch(text, 0, place) if 0 <= place <= _MAX_HEADER else None
            groups = {} if found is None else found.groupdict()
            name = groups.get("name") or groups.get("later") or ""
            if not NAME.fullmatch(name):
                self._state = "plain"
            else:
                pieces.append(Piece(name, "", groups.get("id")))
                self._state, text = "arguments", text[place:]
        if self._state == "arguments":
            end = self._balance.end(text)
            pieces += [Piece(None, text[:end])] if text else []
            self._state = "arguments" if end is None else "done"
        return text if self._state == "plain" else "", pieces

    def end(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        words, pieces = self.cut()
        missing = self._balance.missing() if self._state == "arguments" else ""
        return words, [*pieces, Piece(None, missing)] if missing else pieces

    def cut(self) -> tuple[str, list[Piece]]:
        """As CallBody."""
        held, self._held = self._held, ""
        return held, []


def deepseek() -> HeadedCall:
    """DeepSeek-V3's and V3.1's."""
    return HeadedCall(_DEEPSEEK)


def kimi() -> HeadedCall:
    """Kimi-K2's."""
    return HeadedCall(_KIMI)


def harmony() -> HeadedCall:
    """gpt-oss's."""
    return HeadedCall(_HARMONY)
