"""Calls as bare JSON that is the whole answer: one call, or a list of them."""

from __future__ import annotations

import json

from beheld.text.tools.call import Call, call_from


class JsonReader:
    """Holds an answer that begins like JSON until its end; any other is shown at once."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._begun = False
        self._plain = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """What has become certain."""
        if self._plain:
            return text, []
        if not self._begun:
            text = "".join(self._held) + text
            self._held = []
            begin = text.lstrip()[:1]
            self._begun = begin in ("{", "[")
            self._plain = begin != "" and not self._begun
            if self._plain:
                return text, []
        self._held.append(text)
        return "", []

    def finish(self) -> tuple[str, list[Call]]:
        """The rest: calls if all of it is calls, else text."""
        text, self._held = "".join(self._held), []
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text, []
        calls = [call_from(entry) for entry in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        return ("", found) if found and len(found) == len(calls) else (text, [])
