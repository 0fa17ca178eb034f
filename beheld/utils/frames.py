"""What the calls that an error has ended still hold, and how to let it go."""

from __future__ import annotations

import traceback


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of every call that has ended with `error`, or with one that it came from.

    Its traceback keeps them otherwise: through a failed step's activations, whoever tries again within the `except`
    block has so much less memory, and if a variable holds the error, so has everyone until the garbage collector runs.
    Calls that have not ended keep theirs. Lines of the traceback stay as they are.
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
