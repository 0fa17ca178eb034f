"""Bee's model: transformers' LLaVA-OneVision with another projector."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlavaOnevisionForConditionalGeneration
from transformers.activations import ACT2FN

from beheld.families.bee.config import BeeConfig

# In the repository's code.
_EPS = 1e-6


class BeeProjector(nn.Module):
    """Maps a patch's features to the text model's width: a norm, then two layers, four times as wide between them."""

    def __init__(self, config: BeeConfig) -> None:
        super().__init__()
        vision, text = config.vision_config.hidden_size, config.text_config.hidden_size  # type: ignore[union-attr]
        self.pre_norm = nn.LayerNorm(vision, eps=_EPS)
        self.linear_1 = nn.Linear(vision, 4 * text)
        self.act = ACT2FN[config.projector_hidden_act]
        self.linear_2 = nn.Linear(4 * text, text)

    def forward(self, features: Tensor) -> Tensor:
        """Return (..., text width) of (..., tower width)."""
        projected: Tensor = self.linear_2(self.act(self.linear_1(self.pre_norm(features))))
        return projected


class BeeForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """The published class; its weights have transformers' names."""

    config_class = BeeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.multi_modal_projector = BeeProjector(config)
        self.post_init()
