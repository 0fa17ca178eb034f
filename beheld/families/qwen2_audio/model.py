"""Qwen2-Audio: the audio tower and projector are called in the model's forward, not in a separate method.

Shapes: N audio items, M mel bins, F frames of a whole window, P positions of the tower, E embeddings, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel


def audio_features(model: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """Return embeddings of all audio items, concatenated: (sum of E, H).

    Args:
        model: Qwen2AudioForConditionalGeneration.
        input_features: (N, M, F).
        feature_attention_mask: (N, F), 1 for audio frames.
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower, projector = model.model.audio_tower, model.model.multi_modal_projector
    positions_N, embeds_N = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    positions = (input_features.shape[-1] - 2) // 2 + 1
    # Frames after an item's end are masked.
    heard_NP = torch.arange(positions, device=positions_N.device) < positions_N[:, None]
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros((len(input_features), positions, 1)),
        attention_mask=heard_NP.long(),
    )
    found_NEH = projector(tower(input_features, attention_mask=mask).last_hidden_state)
    return found_NEH[torch.arange(found_NEH.shape[1], device=embeds_N.device) < embeds_N[:, None]]


MODEL = FamilyModel(audio_features=audio_features, plain_head=True)
