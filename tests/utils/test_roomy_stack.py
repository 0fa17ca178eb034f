"""Loops at the end of a piece of the interpreter's frames."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from beheld.utils.roomy_stack import roomy

_CALLS = 2000


def _leaf() -> None:
    pass


def _deep(depth: int) -> None:
    """Call a function many times at each of so many depths."""
    for _ in range(_CALLS):
        _leaf()
    if depth:
        _deep(depth - 1)


def _pages(call: Callable[[int], None]) -> int:
    """How many pages a call took for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call(400)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_of_calls_maps_memory_again_and_again() -> None:
    assert _pages(roomy(_deep)) < _CALLS
    if sys.version_info < (3, 12):
        # What it is for: some depths lie at the end of a piece.
        assert _pages(_deep) >= _CALLS


def test_arguments_results_and_errors_pass() -> None:
    @roomy
    def divided(a: int, *, by: int) -> float:
        return a / by

    assert divided(3, by=2) == 1.5
    with pytest.raises(ZeroDivisionError):
        divided(3, by=0)
