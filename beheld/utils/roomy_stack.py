"""Calls with room for the frames of all calls inside.

CPython keeps frames in pieces of 16 KiB, some 150 calls, and unmaps a piece as soon as its first frame ends. A loop
that lies at the end of a piece maps, clears and unmaps 16 KiB with each call: 16,000 times in a start of the server,
0.1 s of processor time. A frame that wants more gets a piece of its own, twice as large as needed, whose second half
holds what is called inside. Nothing of it is memory before it is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Words that the frame asks for: a little more than 1 MiB, so that its piece is 2 MiB large.
_WORDS = (1 << 17) + (1 << 12)


def _call(function: Callable[..., Any], given: Any, options: Any) -> Any:
    return function(*given, **options)


_call_with_room = FunctionType(_call.__code__.replace(co_stacksize=_WORDS), globals())


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function in which much is called, such as one that imports libraries."""

    @functools.wraps(function)
    def called(*given: P.args, **options: P.kwargs) -> R:
        found: R = _call_with_room(function, given, options)
        return found

    return called
