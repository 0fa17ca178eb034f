"""VibeVoice-ASR: embeddings without noise, so that the same audio is always heard alike.

Shapes: N audio items, S samples, E embeddings, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel


def audio_features(model: Any, input_values: Tensor, padding_mask: Tensor) -> Tensor:
    """Return embeddings of all audio items, concatenated: (sum of E, H).

    Args:
        model: VibeVoiceAsrForConditionalGeneration.
        input_values: (N, 1, S).
        padding_mask: (N, S), 1 for samples of the audio.
    """
    found: Tensor = model.get_audio_features(input_values, padding_mask=padding_mask, sample=False).pooler_output
    return found


MODEL = FamilyModel(audio_features=audio_features)
