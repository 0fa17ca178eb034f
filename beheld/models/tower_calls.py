"""Groups items into shared tower calls; in most families, items whose tensors differ only in the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.core.plan import EncodeItem
from beheld.families.model import TowerCall


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Group items by modality and by the shapes of their tensors beyond the first dimension."""
    groups: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(signature(item), []).append(index)
    calls: list[TowerCall] = []
    for (modality, _), indices in groups.items():
        if modality == "embeds":
            calls.append((modality, indices, {}))
        else:
            calls.append((modality, indices, concatenate([items[i].features for i in indices])))
    return calls


def signature(item: EncodeItem) -> tuple[str, Any]:
    """Return what must be equal for two items to share a call."""
    if "embeds" in item.features:
        return "embeds", ()
    shapes = tuple(
        (name, tuple(value.shape[1:]) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(item.features.items())
    )
    return item.modality, shapes


def moved(value: Any, upload: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Any:
    """Return a feature on the device, floating-point ones in `dtype`; what is no tensor stays as it is."""
    if not isinstance(value, Tensor):
        return value
    value = upload(value)
    return value.to(dtype) if value.is_floating_point() else value


def concatenate(features: Sequence[Any]) -> dict[str, Any]:
    """Concatenate tensors along the first dimension; other values are equal in all items and passed on."""
    first = features[0]
    if len(features) == 1:
        return dict(first)
    return {
        name: torch.cat([f[name] for f in features]) if isinstance(value, Tensor) else value
        for name, value in first.items()
    }
