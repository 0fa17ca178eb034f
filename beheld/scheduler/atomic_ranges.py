"""The ranges of a prompt that must be computed in one step, because attention looks ahead within them."""

from __future__ import annotations

from beheld.core.config import ModelInfo
from beheld.core.request import Request

Range = tuple[int, int]


def atomic_ranges(request: Request, info: ModelInfo) -> tuple[Range, ...]:
    """The ranges of positions (start, stop) that no slice may end within, in order."""
    if info.both_ways == "prompt":
        return ((0, len(request.token_ids)),)
    joint = joint_range(request, info)
    if joint is not None:
        return (joint,)
    if info.atomic_spans:
        return tuple(run for span in request.spans for run in span.runs())
    return ()


def joint_range(request: Request, info: ModelInfo) -> Range | None:
    """From the first to the last of the positions that all see each other; None if there are none."""
    if info.both_ways != "joint":
        return None
    joint = [position for position, token in enumerate(request.token_ids) if token in info.joint_ids]
    return (joint[0], joint[-1] + 1) if joint else None
