"""Qwen2.5-Omni: audio items of different lengths share a tower call, because a mask marks where each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from beheld.core.media import AUDIO_PLACES
from beheld.core.plan import EncodeItem
from beheld.families.model import FamilyModel, ItemPart, TowerCall
from beheld.models import tower_calls

SPEECH = ("talker.", "token2wav.", "code2wav.")
"""Return the weight prefixes of the speaking parts, which are left out."""
AUDIO = ("input_features", "feature_attention_mask")
"""Return the features of audio."""


def combine(items: Sequence[EncodeItem]) -> list[TowerCall]:
    """Combine audio in one call, padded to the longest; everything else by the default rule."""
    audios = [i for i, item in enumerate(items) if "feature_attention_mask" in item.features]
    others = [i for i in range(len(items)) if i not in audios]
    calls: list[TowerCall] = []
    if audios:
        longest = max(items[i].features["feature_attention_mask"].shape[-1] for i in audios)
        padded = {
            name: torch.cat([F.pad(f := items[i].features[name], (0, longest - f.shape[-1])) for i in audios])
            for name in AUDIO
        }
        calls.append(("audio", audios, padded))
    for modality, indices, options in tower_calls.combine([items[i] for i in others]):
        calls.append((modality, [others[i] for i in indices], options))
    return calls


def parts(item: EncodeItem) -> tuple[ItemPart, ...]:
    """Return a video and its audio, which `interleave` in inputs.py makes one item; () for other items."""
    features = dict(item.features)
    places = features.pop(AUDIO_PLACES, None)
    if places is None:
        return ()
    heard = {name: features.pop(name) for name in AUDIO}
    of_video = torch.ones(item.num_embeds, dtype=torch.bool)
    of_video[places] = False
    return (
        (replace(item, features=features, num_embeds=item.num_embeds - len(places)), of_video.nonzero().flatten()),
        (replace(item, modality="audio", features=heard, num_embeds=len(places)), places),
    )


MODEL = FamilyModel(combine=combine, parts=parts, plain_head=True, packs_attention=True, unused_weights=SPEECH)
