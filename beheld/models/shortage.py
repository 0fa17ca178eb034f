"""Recognizes that memory has run out, whichever library says so, and tells it in the engine's own words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from beheld.core.errors import BeheldError, CapacityError
from beheld.utils.frames import clear_frames

_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Unable to allocate")
_TRIED = re.compile(r"tried to allocate ([\d.]+ ?(?:bytes|[KMGT]i?B))", re.IGNORECASE)


def count() -> int:
    """How often PyTorch has run out of a GPU's memory in this process."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats().get("num_ooms", 0))


def is_shortage(error: BaseException, since: int | None = None) -> bool:
    """True if an error is a lack of memory, on a GPU or on the host.

    Args:
        since: what `count` was before. transformers' loader notes errors of single weights, and what it raises in the
            end does not name them.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in _WORDS):
        return True
    return since is not None and count() > since


def free_and_total(device: str) -> tuple[int, int]:
    """Bytes of the device's memory that are free, and all of them; of the host's, those that can be had."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    page = os.sysconf("SC_PAGE_SIZE")
    free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    try:
        # What the system keeps of files counts as available here, but not as free.
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return free, total
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return (free if available is None else int(available) << 10), total


@contextmanager
def told(doing: str, device: str, remedy: str, wanted_bytes: int | None = None) -> Iterator[None]:
    """A lack of memory within the block becomes a CapacityError; any other error stays what it is.

    Args:
        doing: what the block does, as "load the weights".
        device: "cpu" or "cuda", whose memory is meant.
        remedy: what would help, naming the option.
        wanted_bytes: what all of it takes, if that is known.
    """
    before = count()
    try:
        yield
    except BeheldError:
        raise
    except Exception as error:
        if not is_shortage(error, before):
            raise
        free, total = free_and_total(device)
        piece = _TRIED.search(str(error))
        needs = [] if wanted_bytes is None else [f"it takes about {gib(wanted_bytes)} in all"]
        if piece is not None:
            needs.append(f"{piece.group(1)} more could not be had")
        where = "on the GPU" if device == "cuda" else "on this machine"
        said = "; ".join([*needs, f"{gib(free)} of {gib(total)} were free {where}"])
        # What failed is still held by the calls that its traceback names: whoever catches this may try something else.
        clear_frames(error)
        raise CapacityError(f"There is not enough memory to {doing}: {said}.", remedy) from error


def gib(num_bytes: int) -> str:
    """A size in words, for messages."""
    return f"{num_bytes / 2**30:.2f} GiB"
