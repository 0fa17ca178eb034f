"""Environment variables of this process that have a value only as long as someone needs it.

For libraries that take a setting from nowhere else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping


class HeldVariables:
    """Sets variables that have no value, and takes back what it has set; a user's own values stay."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._users = 0
        self._set: dict[str, str] = {}

    def hold(self, wanted: Mapping[str, str]) -> None:
        """Set those that have no value; one call of `leave` for each of this."""
        with self._turn:
            self._users += 1
            for name, value in wanted.items():
                if name not in os.environ:
                    os.environ[name] = self._set[name] = value

    def leave(self) -> None:
        """Take back what was set, after the last user, unless it has been changed meanwhile."""
        with self._turn:
            self._users -= 1
            if self._users:
                return
            for name, value in self._set.items():
                if os.environ.get(name) == value:
                    del os.environ[name]
            self._set.clear()

    def has_set(self, name: str, value: str) -> bool:
        """True if the variable's value comes from here."""
        return self._set.get(name) == value


HELD = HeldVariables()
