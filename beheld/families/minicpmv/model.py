"""MiniCPM-V's model as the engine runs it: its tower reads sizes as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    host_features=frozenset(("tgt_sizes", "num_slices")),
    towers={
        "image": ("model.vpm", "model.resampler"),
        "video": ("model.vpm", "model.resampler"),
    },
)
