"""Music Flamingo: the encoder's states are rotated by the time at which they were heard.

Shapes: W windows of all items, M mel bins, F frames of a window, P positions of the encoder, D its width, E embeddings,
H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel

# Frames of a position: one of two convolutions halves them, and so does pooling.
_FRAMES = 4


def audio_features(model: Any, input_features: Tensor, input_features_mask: Tensor, windows: Tensor) -> Tensor:
    """Return embeddings of all audio items, concatenated: (sum of E, H).

    Args:
        model: MusicFlamingoForConditionalGeneration.
        input_features: (W, M, F).
        input_features_mask: (W, F), 1 for frames of the audio.
        windows: (W,), the number of each window in its item. transformers finds it from the prompt's placeholders.
    """
    from transformers.models.musicflamingo.modeling_musicflamingo import apply_rotary_time_emb

    core = model.model
    states_WPD = core.audio_tower(input_features, input_features_mask=input_features_mask).last_hidden_state
    _, counts_W = core.audio_tower._get_feat_extract_output_lengths(input_features_mask.sum(-1).to(torch.long))
    positions, step_s = states_WPD.shape[1], model.config.audio_frame_step * _FRAMES
    offsets_P = torch.arange(positions, device=states_WPD.device, dtype=torch.float32) * step_s
    times_WP = windows.to(states_WPD.device)[:, None] * positions * step_s + offsets_P
    cos, sin = core.pos_emb(times_WP, seq_len=positions)
    embeds_WPH = core.multi_modal_projector(apply_rotary_time_emb(states_WPD, cos, sin))
    return embeds_WPH[torch.arange(positions, device=counts_W.device) < counts_W[:, None]]


MODEL = FamilyModel(audio_features=audio_features)
