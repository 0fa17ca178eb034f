"""Ultravox's model as the engine runs it: lengths and counts are read as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    host_features=frozenset(("audio_lens", "audio_num_chunks")),
    towers={"audio": ("model.audio_tower", "model.multi_modal_projector")},
    plain_head=True,
)
