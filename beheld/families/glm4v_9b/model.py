"""GLM-4V-9B's model as the engine runs it."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    repeats_positions=True,
    positions_by_kind=True,
    towers={"image": ("model.vision",)},
)
