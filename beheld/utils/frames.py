"""Frees what the calls that an error has ended still hold."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of every call that has ended with `error`, or with an error that caused it.

    Otherwise its traceback keeps them: a second attempt within the `except` block lacks the memory of the first one's
    activations, and if a variable holds the error, so does everything until the garbage collector runs. Calls that
    have not ended keep their variables. The lines of the traceback stay.
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
