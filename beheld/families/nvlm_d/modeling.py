"""NVLM-D's model: transformers' InternVL with another projector."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import InternVLForConditionalGeneration

from beheld.families._shared.intern_chat import reads_chat_layout
from beheld.families.nvlm_d.config import NVLMConfig


class NVLMProjector(nn.Module):
    """Four patches' states (..., 4 V) to one embedding (..., H), through the width of the text model's MLP."""

    def __init__(self, config: NVLMConfig) -> None:
        super().__init__()
        text = config.text_config
        width = config.vision_config.hidden_size * int(1 / config.downsample_ratio) ** 2
        self.layer_norm = nn.LayerNorm(width)
        self.linear_1 = nn.Linear(width, text.intermediate_size, bias=False)
        self.linear_2 = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)

    def forward(self, image_features: Tensor) -> Tensor:
        """Project the states."""
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(self.layer_norm(image_features))))
        return projected


@reads_chat_layout
class NVLMForConditionalGeneration(InternVLForConditionalGeneration):
    """transformers' InternVL that reads the published layout, with NVLM-D's projector."""

    config_class = NVLMConfig

    def __init__(self, config: NVLMConfig) -> None:
        super().__init__(config)
        self.model.multi_modal_projector = NVLMProjector(config)
