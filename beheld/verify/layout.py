"""Aligns a tensor of a whole prompt with tensors of its items, which were processed one by one.

A processor that receives all items at once stacks or concatenates them, pads shorter ones, and may number indices
across items. Only the items' contents can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Outputs that are row indices into another output, counted from a prompt's first item; negative ones are padding.
_RUNNING = frozenset({"image_token_pooling", "video_token_pooling"})


def pairs(name: str, whole: Tensor, items: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    """Return, per item, its part of `whole` and its own tensor in one shape; None if they do not match.

    Args:
        name: of the processor's output.
        whole: of any shape.
        items: in prompt order, with as many dimensions, each possibly shorter than its part of `whole`.
    """
    axis = _axis(whole, items)
    if axis is None:
        return None
    made = []
    for part, item in zip(whole.split([item.shape[axis] for item in items], axis), items, strict=True):
        if any(own > there for own, there in zip(item.shape, part.shape, strict=True)):
            return None
        part = part[tuple(slice(extent) for extent in item.shape)]
        made.append((_from_first(part), _from_first(item)) if name in _RUNNING else (part, item))
    return made


def _axis(whole: Tensor, items: Sequence[Tensor]) -> int | None:
    """Return the dimension along which items are concatenated.

    It is the first whose sizes add up, after dimensions of size 1 only.
    """
    if not items or any(item.dim() != whole.dim() for item in items):
        return None
    for axis in range(whole.dim()):
        if sum(item.shape[axis] for item in items) == whole.shape[axis]:
            return axis
        if any(tensor.shape[axis] != 1 for tensor in (whole, *items)):
            return None
    return None


def _from_first(indices: Tensor) -> Tensor:
    known = indices[indices >= 0]
    return indices if not known.numel() else indices.where(indices < 0, indices - known.min())
