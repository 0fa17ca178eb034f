"""DeepSeek-OCR's model as the engine runs it: grids are read as numbers, indices are made on the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Replace the lookup of each of SAM's layers: transformers makes the indices on the CPU in every call."""
    for layer in model.model.sam_model.layers if hasattr(model.model, "sam_model") else ():
        changes.set(layer.attn, "get_rel_pos", relative_positions)


def relative_positions(q_size: int, k_size: int, rel_pos: Tensor) -> Tensor:
    """Return the embedding of each distance between a row (or column) of queries and one of keys, (q_size, k_size, C).

    Those of the tower's size are resized to that of smaller views.
    """
    assert q_size == k_size, "a tower attends within squares"
    count = 2 * k_size - 1
    if len(rel_pos) != count:
        sized = F.interpolate(rel_pos.to(torch.float32).t()[None], size=count, mode="linear")
        rel_pos = sized[0].t().to(rel_pos.dtype)
    steps = torch.arange(k_size, device=rel_pos.device)
    return rel_pos[steps[:, None] - steps[None, :] + (k_size - 1)]


MODEL = FamilyModel(
    adapt=adapt,
    host_features=frozenset(("grids",)),
    towers={"image": ("model.sam_model", "model.vision_model", "model.projector")},
    unused_weights=("model.vision_model.embeddings.patch_embedding.", "model.vision_model.embeddings.position_ids"),
)
