"""Rotary embeddings with two scales (LongRoPE, arXiv 2402.13753), chosen per sequence instead of per batch.

transformers uses the long scale for a whole batch once its largest position exceeds the original training length. Here
a sequence with a longer prompt uses it from its start, and no other sequence of the batch does: its positions count
from FAR.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.surgery.operation import Changes

# Beyond any real position.
FAR = 1 << 24


class TwoScales(nn.Module):
    """Replaces a model's rotary embedding of the type "longrope"."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        known = rotary.config.rope_parameters["original_max_position_embeddings"]
        short = rotary.original_inv_freq
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, short.device, seq_len=known + 1)
        self.scaling = float(rotary.attention_scaling)
        self.__dict__["rotary"] = rotary
        self.register_buffer("frequencies_2F", torch.stack([short.float(), long.float()]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, 2 F) of positions (B, T), in the type of `x`."""
        far = position_ids >= FAR
        places = torch.where(far, position_ids - FAR, position_ids)
        angles = places[..., None].float() * self.frequencies_2F[far.long()]  # type: ignore[index]
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)


def replace_two_scales(model: Any, changes: Changes) -> None:
    """Replace the rotary embedding of the model's decoder, if it is one with two scales."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    rotary = getattr(decoder, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "longrope":
        changes.replace(decoder, "rotary_emb", TwoScales(rotary), lambda made: made.__dict__["rotary"])
