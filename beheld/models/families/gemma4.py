"""Gemma 4: what its tower gives for sounds holds places behind the end of the shorter ones, which its mask names."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def audio_features(model: Any, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
    """Embeddings of all sounds, one after the other: (sum of E, H).

    Args:
        model: Gemma4ForConditionalGeneration.
        input_features: (sounds, frames, mel bins).
        input_features_mask: (sounds, frames), true for frames of the sound.
    """
    made = model.model.get_audio_features(input_features, input_features_mask, return_dict=True)
    heard: Tensor = made.pooler_output[made.attention_mask]
    return heard
