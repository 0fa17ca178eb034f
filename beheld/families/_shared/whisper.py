"""Whisper's encoder for audio of any length up to its window.

Shapes: C chunks, M mel bins, F feature frames, P positions of the encoder, D its width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.whisper.modeling_whisper import WhisperEncoder


def num_positions(frames: int) -> int:
    """Return the number of encoder positions of so many feature frames."""
    return (frames - 1) // 2 + 1


class ShortWhisperEncoder(WhisperEncoder):
    """Whisper's encoder, which takes fewer frames than its window, and ignores those after a chunk's end."""

    def forward(self, input_features: Tensor, lengths: Any = None) -> Tensor:
        """Return the features (C, P, D) of mel frames (C, M, F).

        Args:
            input_features: (C, M, F), at most the window's frames.
            lengths: the frames of each chunk, C numbers; None if all are whole.
        """
        x_CPD = gelu(self.conv2(gelu(self.conv1(input_features)))).transpose(1, 2)
        positions = x_CPD.shape[1]
        x_CPD = x_CPD + self.embed_positions.weight[:positions]
        mask = None
        if lengths is not None and any(num_positions(length) < positions for length in lengths):
            ends_C = torch.tensor([num_positions(length) for length in lengths], device=x_CPD.device)
            mask_CP = torch.arange(positions, device=x_CPD.device) < ends_C[:, None]
            mask = create_bidirectional_mask(config=self.config, inputs_embeds=x_CPD, attention_mask=mask_CP.long())
        for layer in self.layers:
            x_CPD = layer(x_CPD, mask)
        features: Tensor = self.layer_norm(x_CPD)
        return features
