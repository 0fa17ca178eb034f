"""Frees the local variables that a caught exception keeps alive."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of every ended call in the traceback of `error` and of its causes.

    Otherwise the traceback keeps them alive: a second attempt inside the `except` block lacks the memory of the first
    attempt's activations, and if a variable refers to the error, everything lives until the garbage collector runs.
    Calls that have not ended keep their variables. The lines of the traceback stay.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
