"""Gives a subclass the name of its parent, for transformers' loader."""

from __future__ import annotations

from typing import Any


def named_as(made: Any, parent: Any) -> Any:
    """Return the class `made` with name and module of `parent`: the loader chooses by them which weights to rename."""
    made.__name__, made.__qualname__, made.__module__ = parent.__name__, parent.__qualname__, parent.__module__
    return made
