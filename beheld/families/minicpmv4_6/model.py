"""MiniCPM-V 4.6: mixers with the gated delta rule, and a tower that packs all slices of a call in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from beheld.core.plan import EncodeItem
from beheld.families._shared.gated_delta.mixer import replace_mixers
from beheld.families.model import FamilyModel, TowerCall


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Lay the patches of all images, and of all videos, side by side; see FamilyModel.combine."""
    calls: list[TowerCall] = []
    for modality in dict.fromkeys(item.modality for item in items):
        places = [place for place, item in enumerate(items) if item.modality == modality]
        features = [items[place].features for place in places]
        joined = {
            name: torch.cat([each[name] for each in features], dim=-1 if name.startswith("pixel_values") else 0)
            for name in features[0]
        }
        calls.append((modality, places, joined))
    return calls


MODEL = FamilyModel(
    adapt=replace_mixers,
    combine=combine,
    plain_axes=True,
    plain_head=True,
    host_features=frozenset(("target_sizes", "target_sizes_videos")),
    unused_weights=("mtp.",),
)
