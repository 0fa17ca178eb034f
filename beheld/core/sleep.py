"""What a sleeping engine lacks, and what becomes of the requests that it has when it falls asleep."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from beheld.core.errors import ParamsError


class EnginePart(StrEnum):
    """What an engine needs to answer: the model's weights, its cache with all that depends on it, and steps."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    SCHEDULING = "scheduling"


class PauseMode(StrEnum):
    """What becomes of the requests that an engine has: they end now, end first, or go on after it has woken up."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


# Without either, an engine refuses requests; while only steps are paused, requests wait.
MEMORY = frozenset({EnginePart.WEIGHTS, EnginePart.KV_CACHE})
LEVELS = (0, 1, 2)


def level_of(value: object) -> int:
    """A level of sleep.

    Raises:
        ParamsError: there is no such level.
    """
    if type(value) is not int or value not in LEVELS:
        raise ParamsError(
            f"level must be 0, 1 or 2, got {value!r}.",
            "0 pauses, 1 gives back the cache and 2 the weights as well.",
            param="level",
        )
    return value


def mode_of(value: object) -> PauseMode:
    """A mode by its name.

    Raises:
        ParamsError: there is no such mode.
    """
    try:
        return PauseMode(str(value))
    except ValueError as error:
        names = ", ".join(PauseMode)
        raise ParamsError(f"mode must be one of {names}, got {value!r}.", "Leave it out.", param="mode") from error


def parts_of(tags: Collection[str] | None) -> frozenset[EnginePart]:
    """The parts of these names; all for None.

    Raises:
        ParamsError: there is no such part.
    """
    if tags is None:
        return frozenset(EnginePart)
    try:
        return frozenset(EnginePart(tag) for tag in ([tags] if isinstance(tags, str) else tags))
    except ValueError as error:
        names = ", ".join(EnginePart)
        raise ParamsError(f"tags must be of {names}, got {tags!r}.", "Leave them out for all.", param="tags") from error


def lost_at(level: int) -> frozenset[EnginePart]:
    """What an engine lacks at this level."""
    return frozenset(EnginePart) if level else frozenset({EnginePart.SCHEDULING})
