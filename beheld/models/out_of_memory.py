"""Recognizes that memory has run out, whichever library says so, and says it in the engine's own words."""

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
    """How often memory of a device has run out in this process."""
    return sum(platform.out_of_memory_count() for platform in PLATFORMS.values())


def is_out_of_memory(error: BaseException, since: int | None = None) -> bool:
    """True if an error is a lack of memory, on a device or on the host.

    Args:
        since: what `count` was before. transformers' loader notes errors of single weights, and what it raises in the
            end does not name them.
    """
    if any(platform.is_out_of_memory(error) for platform in PLATFORMS.values()):
        return True
    return since is not None and count() > since


@contextmanager
def explained(doing: str, platform: Platform, remedy: str, wanted_bytes: int | None = None) -> Iterator[None]:
    """A lack of memory within the block becomes a CapacityError; any other error stays what it is.

    Args:
        doing: what the block does, as "load the weights".
        platform: whose memory the block takes.
        remedy: what would help, naming the option.
        wanted_bytes: what all of it takes, if that is known.
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
        # What failed is still held by the calls that its traceback names: the caller may try something else.
        clear_frames(error)
        raise CapacityError(f"There is not enough memory to {doing}: {said}.", remedy) from error


def gib(num_bytes: int) -> str:
    """A size in words, for messages."""
    return f"{num_bytes / 2**30:.2f} GiB"
