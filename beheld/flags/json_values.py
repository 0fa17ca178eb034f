"""Flags with a JSON value, given whole or entry by entry as `--flag.key VALUE` (vLLM's second form)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from beheld.core.errors import ConfigError


def json_value(text: str) -> Any:
    """Parse a JSON value for argparse."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, for example '{{\"image\": 2}}', got {text!r}") from error


class Entries:
    """The `--flag.key VALUE` entries collected from a command line."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Any]] = {}
        self._whole: set[str] = set()

    def add(self, flag: str, path: list[str], text: str) -> None:
        """Add one entry: `--flag.a.b 2` is `{"a": {"b": 2}}`, and `--flag.a+ x,y` is `{"a": ["x", "y"]}`.

        Args:
            flag: its spelling with dashes.
            path: the names after its dots.
            text: the value: JSON if it parses, else text. The last value of a name wins, as with flags.

        Raises:
            ConfigError: a name is empty or already has a plain value, or the flag was also given whole.
        """
        *outer, last = path
        several = last.endswith("+")
        if not all((*outer, last.removesuffix("+"))):
            raise ConfigError(f"{flag}.{'.'.join(path)} has an empty name.", f"Write {flag}.KEY VALUE.")
        place = self._objects.setdefault(flag, {})
        self._once(flag)
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{flag} has a value and entries under {name!r}.", "Give either.")
        place[last.removesuffix("+")] = text.split(",") if several else json_or_text(text)

    def given(self, flag: str) -> None:
        """Note that the flag was given with its whole value.

        Raises:
            ConfigError: entries of the flag were given as well.
        """
        self._whole.add(flag)
        self._once(flag)

    def words(self) -> Iterator[str]:
        """Return each flag with the JSON value that its entries form."""
        for flag, made in self._objects.items():
            yield f"{flag}={json.dumps(made)}"

    def _once(self, flag: str) -> None:
        if flag in self._whole and flag in self._objects:
            raise ConfigError(f"{flag} is given whole and by entries.", "Use one form.")


def json_or_text(text: str) -> Any:
    """Return the JSON value of a text, or the text itself if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
