"""NVLM-D's model: transformers' InternVL with another projector, and with further heads in its tower.

To the 25 heads of InternViT-6B the checkpoint adds seven, so that eight devices can share them. They attend as the
others do, but the norms of queries and keys measure the first 25 alone.

Shapes: B tiles, N states of a tile, V width of the tower, D a head's, W width of all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import InternVLForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.internvl.modeling_internvl import eager_attention_forward

from beheld.families._shared.intern.modeling import reads_chat_layout
from beheld.families.nvlm_d.config import NVLMConfig

_FURTHER_HEADS = 7


class PartialRMSNorm(nn.Module):
    """A root mean square norm of (..., W) by the first `measured` values."""

    def __init__(self, width: int, measured: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.measured, self.eps = measured, eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm the states, in float32."""
        exact = hidden_states.to(torch.float32)
        variance = exact[..., : self.measured].pow(2).mean(-1, keepdim=True)
        return (exact * torch.rsqrt(variance + self.eps)).to(hidden_states.dtype) * self.weight


class NVLMVisionAttention(nn.Module):
    """The tower's attention with further heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.is_causal = False
        self.head_dim = config.hidden_size // config.num_attention_heads
        width = self.head_dim * (config.num_attention_heads + _FURTHER_HEADS)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(config.hidden_size, width, bias=config.attention_bias) for _ in range(3)
        )
        norm = (width, config.hidden_size, config.layer_norm_eps)
        self.q_norm = PartialRMSNorm(*norm) if config.use_qk_norm else nn.Identity()
        self.k_norm = PartialRMSNorm(*norm) if config.use_qk_norm else nn.Identity()
        self.projection_layer = nn.Linear(width, config.hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """(B, N, V) -> (B, N, V), and the weights of attention if the implementation returns them."""
        queries = self.q_norm(self.q_proj(hidden_states))
        keys, values = self.k_norm(self.k_proj(hidden_states)), self.v_proj(hidden_states)
        heads = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (queries, keys, values))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        seen, weights = attend(
            self, *heads, attention_mask, dropout=0.0, scaling=self.head_dim**-0.5, is_causal=False, **kwargs
        )
        return self.projection_layer(seen.flatten(2)), weights


class NVLMProjector(nn.Module):
    """Four patches' states (..., 4 V) to one embedding (..., H), through the width of the text model's MLP."""

    def __init__(self, config: NVLMConfig) -> None:
        super().__init__()
        text: Any = config.text_config
        vision: Any = config.vision_config
        width = vision.hidden_size * int(1 / config.downsample_ratio) ** 2
        self.layer_norm = nn.LayerNorm(width)
        self.linear_1 = nn.Linear(width, text.intermediate_size, bias=False)
        self.linear_2 = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)

    def forward(self, image_features: Tensor) -> Tensor:
        """Project the states."""
        projected: Tensor = self.linear_2(F.gelu(self.linear_1(self.layer_norm(image_features))))
        return projected


@reads_chat_layout
class NVLMForConditionalGeneration(InternVLForConditionalGeneration):
    """transformers' InternVL that reads the published layout, with NVLM-D's tower and projector."""

    config_class = NVLMConfig

    def __init__(self, config: NVLMConfig) -> None:
        super().__init__(config)
        for layer in self.model.vision_tower.encoder.layer:
            layer.attention = NVLMVisionAttention(config.vision_config)
        self.model.multi_modal_projector = NVLMProjector(config)
