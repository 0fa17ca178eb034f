"""Fields of a request that have no effect here: accepted, and named in the answer's `warnings`."""

from __future__ import annotations

from typing import Any

FOREIGN = "unknown_fields"


class Notes:
    """The fields of one request that were accepted without effect.

    Args:
        strict: such fields are refused instead (`--strict-fields`).
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.fields: dict[str, str] = {}
        self._foreign: set[str] = set()

    def tell(self, name: str, words: str, *, foreign: bool = False) -> None:
        """Record a field; a second time changes nothing.

        Args:
            foreign: the name is the client's own, and may be any text.
        """
        if name not in self.fields and foreign:
            self._foreign.add(name)
        self.fields.setdefault(name, words)

    @property
    def names(self) -> list[str]:
        """Names for headers and counters; one stands for all that clients made up."""
        known = [name for name in self.fields if name not in self._foreign]
        return [*known, FOREIGN] if self._foreign else known

    def warnings(self) -> list[dict[str, Any]]:
        """The answer's field `warnings`."""
        return [{"param": name, "message": words} for name, words in self.fields.items()]
