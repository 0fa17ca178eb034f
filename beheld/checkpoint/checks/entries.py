"""What an entry of a checkpoint's JSON file may be, and the error that names file, key and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ModelError

_SHOWN = 60
# Dictionaries whose keys are not names of settings.
_NOT_SETTINGS = (
    "quantization_config",
    "compression_config",
    "id2label",
    "label2id",
    "auto_map",
    "task_specific_params",
)


@dataclass(frozen=True)
class Numbers:
    """Finite numbers from `low` to `high`.

    Attributes:
        low, high: bounds.
        whole: only integers.
        above: `low` itself is too small.
        each: in lists and mappings, of each entry; without it those pass, for they mean something else.
        strict: mappings, lists but those of `each`, and floats for whole numbers are refused.
    """

    low: float
    high: float
    whole: bool = False
    above: bool = False
    each: bool = False
    strict: bool = False

    def wrong(self, value: Any) -> bool:
        """True if a setting may not have this value; None leaves it to its default."""
        if value is None:
            return False
        if self.strict and not self._of_its_kind(value):
            return True
        if isinstance(value, list | Mapping):
            entries = value.values() if isinstance(value, Mapping) else value
            return self.each and any(map(self.wrong, entries))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return True
        return not self.low <= value <= self.high or (self.above and value == self.low)

    def _of_its_kind(self, value: Any) -> bool:
        kinds = (int,) if self.whole else (int, float)
        entries = value if self.each and isinstance(value, list) else [value]
        return all(isinstance(entry, kinds) for entry in entries)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        return f"{kind} {'above' if self.above else 'from'} {self.low:g} to {self.high:g}"


def settings(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every setting at any depth: its path ("text_config.hidden_size"), its own name, and its value."""
    for name, entry in value.items():
        where = f"{path}.{name}" if path else name
        yield where, name, entry
        if isinstance(entry, Mapping) and name not in _NOT_SETTINGS:
            yield from settings(entry, where)


def refused(file: str, key: str, value: Any, wanted: str) -> ModelError:
    """The error about one entry."""
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return ModelError(
        f"{file}: {key} is {shown}, and must be {wanted}.", f"Mend {key} in {file}, or fetch the checkpoint again."
    )


def check_numbers(file: str, raw: Mapping[str, Any], bounds: Mapping[str, Numbers]) -> None:
    """Check every setting that `bounds` names, at any depth, and that no number anywhere is NaN.

    Raises:
        ModelError: as above.
    """
    for where, name, value in settings(raw):
        bound = bounds.get(name)
        if bound is not None and bound.wrong(value):
            raise refused(file, where, value, str(bound))
        entries = value if isinstance(value, list) else (value,)
        if any(isinstance(entry, float) and math.isnan(entry) for entry in entries):
            raise refused(file, where, value, "a number")
