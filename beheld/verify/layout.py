"""Brings one tensor of a whole prompt and those of its items, made one by one, into the same layout.

A processor that is given all items at once stacks them or strings them together, fills the shorter ones up, and may let
indices run on from item to item. Only what the items themselves hold can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Outputs whose values are rows of another output, counted from a prompt's first item on; negative ones are filling.
_RUNNING = frozenset({"image_token_pooling", "video_token_pooling"})


def pairs(name: str, whole: Tensor, items: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Of each item, its part of `whole` and its own tensor in one shape; None if `whole` cannot be made of these items.

    Args:
        name: of the processor's output.
        whole: of any shape.
        items: in the order of the prompt, of as many dimensions, each perhaps shorter than its part of `whole`.
    """
    axis = _axis(whole, items)
    if axis is None:
        return None
    made = []
    for part, item in zip(whole.split([item.shape[axis] for item in items], axis), items, strict=True):
        if any(own > there for own, there in zip(item.shape, part.shape, strict=True)):
            return None
        part = part[tuple(slice(extent) for extent in item.shape)]
        made.append((_from_own_first(part), _from_own_first(item)) if name in _RUNNING else (part, item))
    return made


def _axis(whole: Tensor, items: Sequence[Tensor]) -> int | None:
    """The dimension along which items follow each other: the first whose extents add up, behind ones alone."""
    if not items or any(item.dim() != whole.dim() for item in items):
        return None
    for axis in range(whole.dim()):
        if sum(item.shape[axis] for item in items) == whole.shape[axis]:
            return axis
        if any(tensor.shape[axis] != 1 for tensor in (whole, *items)):
            return None
    return None


def _from_own_first(indices: Tensor) -> Tensor:
    known = indices[indices >= 0]
    return indices if not known.numel() else indices.where(indices < 0, indices - known.min())
