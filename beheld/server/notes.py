"""Fields of a request that have no effect here: accepted, and named in the answer's `warnings`."""

from __future__ import annotations

from typing import Any


class Notes:
    """The fields of one request that were accepted without effect.

    Args:
        strict: such fields are refused instead (`--strict-fields`).
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fields: dict[str, str] = {}

    def tell(self, name: str, words: str) -> None:
        """Record a field; a second time changes nothing."""
        self.fields.setdefault(name, words)

    def warnings(self) -> list[dict[str, Any]]:
        """The answer's field `warnings`."""
        return [{"param": name, "message": words} for name, words in self.fields.items()]
