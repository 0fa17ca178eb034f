"""Checks of values that users give, with errors that name the parameter and the nearest known name."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from beheld.core.errors import BeheldError, ParamsError

if TYPE_CHECKING:
    import numpy as np

# Longer names are not compared with the known ones.
_MAX_MISSPELT = 128
# Cells of a table that are looked at in one step.
_CELLS_A_STEP = 4096


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A remedy that names the nearest known name; empty if none is as near as `likeness`, of 1, says."""
    if len(name) > _MAX_MISSPELT:
        # No known name is as long, and time and memory of a comparison grow with the length.
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"Did you mean {close[0]!r}?" if close else ""


def known_keywords(kind: Any, options: Iterable[str], error: type[BeheldError], what: str) -> None:
    """Raise `error` for an option that is not a field of the dataclass `kind`; it names the nearest field."""
    known = {f.name for f in fields(kind)}
    for name in options:
        if name not in known:
            raise error(f"Unknown {what} {name!r}.", nearest(name, known), param=name)


def whole(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> Any:
    """`value` as Python's int, or None where it is optional.

    Raises:
        ParamsError: it is not an integer (Python's or numpy's, no bool) within `low` to `high`, both included.
    """
    if value is None and optional:
        return None
    # isinstance with an abstract class is the slowest step here, and each request runs this twenty times.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise ParamsError(f"{name} must be a whole number, got {value!r}.", "Leave it out for the default.", param=name)
    value = int(value)
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ParamsError(f"{name} must be {span}, got {value}.", "Leave it out for the default.", param=name)
    return value


def number(name: str, value: Any, low: float, high: float) -> Any:
    """`value` as Python's int or float.

    Raises:
        ParamsError: it is not a finite number (Python's or numpy's, no bool) within `low` to `high`, both included.
    """
    # A whole number is always finite, but too large a number does not fit into a float.
    whole_one = type(value) is int or (type(value) is not float and isinstance(value, numbers.Integral))
    known = type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    if not known or not (whole_one or math.isfinite(value)):
        raise ParamsError(
            f"{name} must be a finite number, got {value!r}.", "Leave it out for the default.", param=name
        )
    value = int(value) if whole_one else float(value)
    if not low <= value <= high:
        raise ParamsError(
            f"{name} must be from {low:g} to {high:g}, got {value}.", "Leave it out for the default.", param=name
        )
    return value


def table_of_ids(name: str, value: Any) -> np.ndarray:
    """Token ids as an array (rows, N), int32, of as many columns as the longest row has; -1 fills the others up.

    Raises:
        ParamsError: it is no list of lists of token ids or array of two dimensions, or is empty.
    """
    import numpy as np

    shape: tuple[int, ...] = ()
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        shape = value.shape
    elif isinstance(value, list | tuple) and all(isinstance(row, list | tuple) for row in value):
        shape = len(value), max(map(len, value), default=0)
    if len(shape) != 2 or 0 in shape:
        raise ParamsError(
            f"{name} must be a non-empty table of token ids: a list of lists, or an integer array of "
            "shape [num_rows, num_ids].",
            "Give one row for each position.",
            param=name,
        )
    if isinstance(value, np.ndarray):
        _check_ids(name, int(value.min()), int(value.max()))
        return np.ascontiguousarray(value, dtype=np.int32)
    table = np.full(shape, -1, np.int32)
    for place, row in enumerate(value):
        # Each of these calls keeps the interpreter lock to its end, and together they may be millions of cells.
        for start in range(0, len(row), _CELLS_A_STEP):
            cells = row[start : start + _CELLS_A_STEP]
            wrong = [token for token in cells if type(token) is not int and not _is_whole(token)]
            if wrong:
                raise ParamsError(
                    f"{name} must contain integer token ids, got {wrong[0]!r}.", "-1 fills a row up.", param=name
                )
            _check_ids(name, min(cells), max(cells))
            table[place, start : start + len(cells)] = cells
    return table


def _check_ids(name: str, low: int, high: int) -> None:
    if low < -1 or high >= 2**31:
        raise ParamsError(
            f"{name} holds out-of-vocab token ids: {low if low < -1 else high}.", "-1 fills a row up.", param=name
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def sequence(name: str, value: Any) -> None:
    """Raise ParamsError unless `value` is None, a list, a tuple or a set."""
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise ParamsError(f"{name} must be a list, got {value!r}.", param=name)


def strings(name: str, value: Any) -> list[str]:
    """Raise ParamsError unless `value` is None or a list of strings; return the list."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ParamsError(f"{name} must be a list of strings, got {value!r}.", param=name)
    return list(value)
