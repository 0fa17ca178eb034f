"""GOT-OCR 2.0: the tower looks up relative positions by indices that are made on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Replace the lookup of each layer: transformers makes the indices on the CPU and sends them in every call."""
    for layer in model.model.vision_tower.layers:
        changes.set(layer.attn, "get_rel_pos", relative_positions)


def relative_positions(q_size: int, k_size: int, rel_pos: Tensor) -> Tensor:
    """Return the embedding of each distance between a row (or column) of queries and one of keys, (q_size, k_size, C).

    All images have the tower's size, so nothing is interpolated.
    """
    assert q_size == k_size, "a tower attends within squares"
    assert len(rel_pos) == 2 * k_size - 1, "an embedding for each distance"
    steps = torch.arange(k_size, device=rel_pos.device)
    return rel_pos[steps[:, None] - steps[None, :] + (k_size - 1)]


MODEL = FamilyModel(adapt=adapt)
