"""Logits processors of requests: callables that a user gives, and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from beheld.core.errors import ParamsError

LogitsProcessor = Callable[..., Any]


def num_arguments(processor: LogitsProcessor) -> int:
    """Return how many arguments a logits processor is called with: (output_ids, logits), or prompt_ids before these.

    Raises:
        ParamsError: it requires more than three arguments or accepts fewer than two.
    """
    try:
        signature = inspect.signature(processor)
    except ValueError:  # a built-in without a signature
        return 2
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise ParamsError(
        "A logits processor takes (output_ids, logits) or (prompt_ids, output_ids, logits).", param="logits_processors"
    )
