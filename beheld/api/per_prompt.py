"""Arguments of a call on many prompts: one value for all of them, or a list with one for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ParamsError


def value_at(values: Any, index: int) -> Any:
    """The value for a prompt: an entry of a list, or the common value."""
    return values[index] if isinstance(values, list | tuple) else values


def lengths_of(**values: Any) -> dict[str, int]:
    """The lengths of those arguments that are lists."""
    return {name: len(value) for name, value in values.items() if isinstance(value, list | tuple)}


def check_lengths(lengths: Mapping[str, int], num_prompts: int) -> None:
    """Refuse lists whose length differs from the number of prompts.

    Raises:
        ParamsError: one does.
    """
    for name, length in lengths.items():
        if length != num_prompts:
            raise ParamsError(f"There are {length} {name} for {num_prompts} prompts.", param=name)


def check_enough(lengths: Mapping[str, int], num_prompts: int) -> None:
    """Refuse lists that are too short for the prompts so far.

    Raises:
        ParamsError: one is.
    """
    for name, length in lengths.items():
        if length < num_prompts:
            raise ParamsError(f"There are {length} {name} for {num_prompts} prompts or more.", param=name)
