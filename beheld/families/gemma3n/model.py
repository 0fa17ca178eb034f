"""Gemma 3n: the last ids of the vocabulary, delimiters of images and audio, have the towers' embeddings.

Shapes: T tokens, M such ids, N audio items, F frames, B mel bins, P embeddings of the tower, E places of an item, H
hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.families._shared import per_layer
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class PartedEmbedding(nn.Module):
    """The text's embeddings, and the towers' for ids from `start` on.

    transformers computes the towers' embeddings for every token of every pass; here they are a table.
    """

    media_MH: Tensor

    def __init__(self, text: nn.Embedding, media_MH: Tensor, start: int) -> None:
        super().__init__()
        self.text = text
        self.start = start
        self.register_buffer("media_MH", media_MH, persistent=False)

    @property
    def weight(self) -> Tensor:
        """Return the text's embedding weight."""
        return self.text.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (..., T) -> (..., T, H)."""
        place = (ids - self.start).clamp(0, self.media_MH.shape[0] - 1)
        found: Tensor = torch.where((ids >= self.start).unsqueeze(-1), self.media_MH[place], self.text(ids))
        return found


@torch.no_grad()
def adapt(model: Any, changes: Changes) -> None:
    """Replace the model's input embeddings.

    Raises:
        ModelError: the audio ids do not follow the image ids.
    """
    core = model.model
    vision, audio = core.embed_vision, core.embed_audio
    if vision.vocab_offset + vision.vocab_size != audio.vocab_offset:
        raise ModelError(f"{type(model).__name__} has a gap between its image ids and its audio ids.")
    parts = [
        part(input_ids=torch.arange(part.vocab_offset, part.vocab_offset + part.vocab_size, device=model.device))
        for part in (vision, audio)
    ]
    text = model.get_input_embeddings()
    model.set_input_embeddings(PartedEmbedding(text, torch.cat(parts).to(text.weight.dtype), vision.vocab_offset))
    changes.undo_with(lambda: model.set_input_embeddings(text))


def audio_features(model: Any, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
    """Return embeddings of all audio items, concatenated: (N * E, H).

    Every item has as many places as the longest that the tower accepts; places after its end hold the embedding of the
    vocabulary's last id.

    Args:
        model: Gemma3nForConditionalGeneration, adapted.
        input_features: (N, F, B).
        input_features_mask: (N, F), true for audio frames.
    """
    # The tower's mask is inverted: true for padding.
    made = model.model.get_audio_features(input_features, ~input_features_mask, return_dict=True)
    heard_NPH, silent_NP = made.pooler_output, made.audio_mel_mask
    count, positions, hidden = heard_NPH.shape
    filled = model.get_input_embeddings().media_MH[-1].expand(count, model.config.audio_soft_tokens_per_image, hidden)
    out_NEH = filled.to(heard_NPH.dtype, copy=True)
    out_NEH[:, :positions] = torch.where(silent_NP.unsqueeze(-1), out_NEH[:, :positions], heard_NPH)
    return out_NEH.flatten(0, 1)


MODEL = FamilyModel(adapt=adapt, audio_features=audio_features, extra_columns=per_layer.extra_columns)
