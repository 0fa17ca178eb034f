"""DeepSeek-VL2's model as the engine runs it: its grids are read as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    host_features=frozenset(("grids",)),
    towers={"image": ("model.vision", "model.projector")},
    unused_weights=("model.vision.attn_pool.",),
)
