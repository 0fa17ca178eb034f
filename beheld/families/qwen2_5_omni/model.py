"""Qwen2.5-Omni: audio items of different lengths share a tower call, because a mask marks where each ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from beheld.core.plan import EncodeItem
from beheld.families.model import FamilyModel, TowerCall
from beheld.models import tower_calls

SPEECH = ("talker.", "token2wav.", "code2wav.")
"""Return the weight prefixes of the speaking parts, which are left out."""


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Combine audio in one call, padded to the longest; everything else by the default rule."""
    sounds = [i for i, item in enumerate(items) if "feature_attention_mask" in item.features]
    others = [i for i in range(len(items)) if i not in sounds]
    calls: list[TowerCall] = []
    if sounds:
        longest = max(items[i].features["feature_attention_mask"].shape[-1] for i in sounds)
        padded = {
            name: torch.cat([F.pad(f := items[i].features[name], (0, longest - f.shape[-1])) for i in sounds])
            for name in ("input_features", "feature_attention_mask")
        }
        calls.append(("audio", sounds, padded))
    for modality, indices, options in tower_calls.combine([items[i] for i in others]):
        calls.append((modality, [others[i] for i in indices], options))
    return calls


MODEL = FamilyModel(combine=combine, plain_head=True, packs_attention=True, unused_weights=SPEECH)
