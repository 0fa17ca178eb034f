"""Whisper's encoder for audio of any length up to its window.

Shapes: C chunks, M mel bins, F feature frames, P positions of the encoder, D its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu
from transformers.models.whisper.modeling_whisper import WhisperEncoder


def num_positions(frames: int) -> int:
    """Return the number of encoder positions of so many feature frames."""
    return (frames - 1) // 2 + 1


class ShortWhisperEncoder(WhisperEncoder):
    """Whisper's encoder, which takes fewer frames than its window."""

    def forward(self, input_features: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the features (C, P, D) of mel frames (C, M, F).

        Args:
            input_features: (C, M, F), at most the window's frames.
            seen: which positions attend to which, (C, P, P); None if all do.
        """
        x_CPD = gelu(self.conv2(gelu(self.conv1(input_features)))).transpose(1, 2)
        x_CPD = x_CPD + self.embed_positions.weight[: x_CPD.shape[1]]
        mask = None if seen is None else torch.where(seen, 0.0, torch.finfo(x_CPD.dtype).min)[:, None].to(x_CPD)
        for layer in self.layers:
            x_CPD = layer(x_CPD, mask)
        features: Tensor = self.layer_norm(x_CPD)
        return features


def up_to(lengths: Sequence[int], frames: int, device: Any) -> Tensor | None:
    """Return which positions attend to which, (C, P, P), if each chunk of `frames` ends at its length; None if whole.

    Args:
        lengths: the frames of each chunk, C numbers.
        frames: the frames of all, F.
        device: where the mask is wanted.
    """
    if min(lengths) == frames:
        return None
    positions = num_positions(frames)
    ends_C = torch.tensor([num_positions(length) for length in lengths], device=device)
    seen_CP = torch.arange(positions, device=device) < ends_C[:, None]
    return seen_CP[:, None].expand(-1, positions, -1)
