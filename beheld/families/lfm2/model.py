"""LFM2 and LFM2-VL: most layers are short convolutions, whose inputs are stored in the paged cache.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from beheld.attention.conv import convolve
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class PagedShortConv(nn.Module):
    """The model's gated convolution, for packed tokens of several sequences."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.layer_idx = conv.layer_idx
        self.in_proj, self.out_proj, self.conv = conv.in_proj, conv.out_proj, conv.conv

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Compute (1, T, H) -> (1, T, H); other arguments concern padding and caches, which do not exist here."""
        before, after, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        mixed_TH = convolve(self, (before * x)[0], self.conv.weight.squeeze(1), self.conv.bias)
        out: Tensor = self.out_proj(after * mixed_TH)
        return out


def adapt(model: Any, changes: Changes) -> None:
    """Replace the convolutions; see FamilyModel.adapt."""
    decoder = model.get_decoder()
    for layer in getattr(decoder, "model", decoder).layers:
        # Layers of other stages have no parts.
        if hasattr(layer, "conv"):
            changes.exchange(layer, "conv", PagedShortConv(layer.conv), ("in_proj", "out_proj", "conv"))


MODEL = FamilyModel(adapt=adapt)
