"""Logits processors of requests: callables that a user gives, and how they are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ConfigError, ParamsError

LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True)
class FromPackage:
    """A processor, or a class of some, that an installed package brings; nobody has asked this engine for it."""

    target: Any


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


def of_pooling(given: Sequence[Any] | None) -> None:
    """Refuse the engine's logits processors where its model pools; those of packages have no effect there.

    Raises:
        ConfigError: there are others.
    """
    if any(not isinstance(each, FromPackage) for each in given or ()):
        raise ConfigError(
            "Pooling models do not support custom logits processors.",
            "Leave them out: a vector or a score is not sampled.",
            param="logits_processors",
        )


def check_in_process(given: Sequence[Any] | None) -> None:
    """Refuse the engine's logits processors where it is in a process of its own: functions are not sent there.

    Raises:
        ConfigError: there are some.
    """
    if not given:
        return
    targets = [each.target if isinstance(each, FromPackage) else each for each in given]
    names = ", ".join(str(getattr(each, "__qualname__", each)) for each in targets)
    raise ConfigError(
        f"Logits processors ({names}) run in the process that takes requests, and this engine is in another.",
        "Start one engine in a thread (--engine thread, or engine='thread', without data_parallel_size and "
        "--api-server-count), or leave them out; those of installed packages go with their package.",
        param="logits_processors",
    )
