"""Detects out-of-memory errors of any library and raises them as CapacityError."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from beheld.core.errors import BeheldError, CapacityError
from beheld.platform.platform import Platform
from beheld.platform.registry import PLATFORMS
from beheld.utils.frames import clear_frames

_TRIED = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]i?B))", re.IGNORECASE)


def count() -> int:
    """Return how often device memory has run out in this process."""
    return sum(platform.out_of_memory_count() for platform in PLATFORMS.values())


def is_out_of_memory(error: BaseException, since: int | None = None) -> bool:
    """Return whether an error means that memory ran out, on a device or on the host.

    Args:
        since: an earlier `count`. transformers' loader logs errors of single weights, and the error it finally raises
            does not name them.
    """
    if any(platform.is_out_of_memory(error) for platform in PLATFORMS.values()):
        return True
    return since is not None and count() > since


@contextmanager
def explained(doing: str, platform: Platform, remedy: str, wanted_bytes: int | None = None) -> Iterator[None]:
    """Convert out-of-memory errors within the block to CapacityError; other errors pass unchanged.

    Args:
        doing: what the block does, such as "load the weights".
        platform: whose memory the block takes.
        remedy: what helps, naming the option.
        wanted_bytes: the bytes that it needs in all, if known.
    """
    before = count()
    try:
        yield
    except BeheldError:
        raise
    except Exception as error:
        if not is_out_of_memory(error, before):
            raise
        free, total = platform.memory()
        piece = _TRIED.search(str(error))
        needs = [] if wanted_bytes is None else [f"it takes about {gib(wanted_bytes)} in all"]
        if piece is not None:
            needs.append(f"{piece.group(1)} more could not be had")
        said = "; ".join([*needs, f"{gib(free)} of {gib(total)} were free {platform.place}"])
        # The traceback's frames still hold the failed call's memory, and the caller may try something else.
        clear_frames(error)
        raise CapacityError(f"Not enough memory to {doing}: {said}.", remedy) from error


def gib(num_bytes: int) -> str:
    """Format a size for messages."""
    return f"{num_bytes / 2**30:.2f} GiB"
