"""Qwen-VL's model: a tower of CLIP's layers, queries that attend to its features, and Qwen 2's layers for the text.

Qwen-1's layers are those of Qwen 2 with as many heads of keys as of queries. Only the names and the fused matrices of
the checkpoints differ.

Shapes: I images, P patches of an image, V width of the tower, Q embeddings of an image, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen2Model
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPPreTrainedModel

from beheld.families._shared.modeling import with_media
from beheld.families.qwen_vl.config import QwenVLConfig

_EPS = 1e-6
# The tower's positions are a square of this many, whatever the size of its images.
_POSITIONS = 256
# Width of a head of the queries' attention.
_HEAD = 128
# The published name, or a part of it -> ours; applied in this order.
_NAMES = {
    r"^transformer\.visual\.transformer\.resblocks\.": "model.visual.layers.",
    r"^transformer\.visual\.": "model.visual.",
    r"^transformer\.wte\.": "model.embed_tokens.",
    r"^transformer\.ln_f\.": "model.norm.",
    r"^transformer\.h\.": "model.layers.",
    r"(visual\.layers\.\d+)\.ln_1\.": r"\1.layer_norm1.",
    r"(visual\.layers\.\d+)\.ln_2\.": r"\1.layer_norm2.",
    r"(visual\.layers\.\d+)\.attn\.in_proj\.": r"\1.self_attn.fused.",
    r"(visual\.layers\.\d+)\.attn\.out_proj\.": r"\1.self_attn.out_proj.",
    r"(visual\.layers\.\d+)\.mlp\.c_fc\.": r"\1.mlp.fc1.",
    r"(visual\.layers\.\d+)\.mlp\.c_proj\.": r"\1.mlp.fc2.",
    r"(model\.layers\.\d+)\.ln_1\.": r"\1.input_layernorm.",
    r"(model\.layers\.\d+)\.ln_2\.": r"\1.post_attention_layernorm.",
    r"(model\.layers\.\d+)\.attn\.c_proj\.": r"\1.self_attn.o_proj.",
    # The published MLP multiplies by the activation of its second matrix.
    r"(model\.layers\.\d+)\.mlp\.w1\.": r"\1.mlp.up_proj.",
    r"(model\.layers\.\d+)\.mlp\.w2\.": r"\1.mlp.gate_proj.",
    r"(model\.layers\.\d+)\.mlp\.c_proj\.": r"\1.mlp.down_proj.",
}


class SplitEachHead(ConversionOps):
    """Splits the tower's fused matrix, which has query, key and value of one head after the other."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> Any:
        """Return the three parts of a matrix (heads times three times their width, inputs) or of its bias."""
        heads = kwargs["config"].vision_config.num_attention_heads
        (stored,) = input_dict.values()
        weight: Tensor = stored[0] if isinstance(stored, list) else stored
        by_head = weight.unflatten(0, (heads, 3, -1))
        parts = (by_head[:, index].flatten(0, 1).contiguous() for index in range(3))
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """Checkpoints are not written in this layout."""
        raise NotImplementedError("Qwen-VL's matrices are only read")


def resampled(table: Tensor, count: int) -> Tensor:
    """Return the positions (count, width) of a square of patches, of those of a square of another size."""
    old, new = (round(number**0.5) for number in (len(table), count))
    if old == new:
        return table
    square = table.float().unflatten(0, (old, old)).permute(2, 0, 1)[None]
    grown = F.interpolate(square, size=(new, new), mode="bicubic", align_corners=False)
    return grown[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


class QwenVLResampler(nn.Module):
    """Queries that attend to the tower's features; both have positions."""

    def __init__(self, config: QwenVLConfig) -> None:
        super().__init__()
        width, hidden = config.vision_config.hidden_size, config.hidden_size
        self.pos_embed = nn.Parameter(torch.zeros(config.num_queries, hidden), requires_grad=False)
        self.query = nn.Parameter(torch.zeros(config.num_queries, hidden))
        self.kv_proj = nn.Linear(width, hidden, bias=False) if width != hidden else nn.Identity()
        self.attn = nn.MultiheadAttention(hidden, hidden // _HEAD)
        self.ln_q = nn.LayerNorm(hidden, eps=_EPS)
        self.ln_kv = nn.LayerNorm(hidden, eps=_EPS)

    def forward(self, features: Tensor) -> Tensor:
        """Return the embeddings (I, Q, H) of features (I, P, V)."""
        # Of a view, PyTorch multiplies each patch's rows with the whole matrix anew.
        x_PIH = self.ln_kv(self.kv_proj(features)).transpose(0, 1).contiguous()
        keys = x_PIH + resampled(self.pos_embed, len(x_PIH))[:, None]
        queries = (self.ln_q(self.query) + self.pos_embed)[:, None].repeat(1, len(features), 1)
        out: Tensor = self.attn(queries, keys, x_PIH, need_weights=False)[0].transpose(0, 1)
        return out


class QwenVLVisionTransformer(CLIPPreTrainedModel):
    """The tower and its queries under the published names; `attn_pool` holds the queries."""

    def __init__(self, config: QwenVLConfig) -> None:
        vision = config.vision_config
        super().__init__(vision)
        width: int = vision.hidden_size
        self.conv1 = nn.Conv2d(3, width, kernel_size=vision.patch_size, stride=vision.patch_size, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(_POSITIONS, width))
        self.ln_pre = nn.LayerNorm(width, eps=_EPS)
        self.layers = nn.ModuleList(CLIPEncoderLayer(vision) for _ in range(vision.num_hidden_layers))
        self.attn_pool = QwenVLResampler(config)
        self.ln_post = nn.LayerNorm(config.hidden_size, eps=_EPS)
        self.proj = nn.Parameter(torch.zeros(config.hidden_size, config.hidden_size))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the embeddings (I, Q, H) of images (I, 3, side, side)."""
        x_IPV = self.conv1(pixel_values.to(self.proj.dtype)).flatten(2).transpose(1, 2)
        x_IPV = self.ln_pre(x_IPV + resampled(self.positional_embedding, x_IPV.shape[1]))
        for layer in self.layers:
            x_IPV = layer(x_IPV, attention_mask=None)
        embeds: Tensor = self.ln_post(self.attn_pool(x_IPV)) @ self.proj
        return embeds


class QwenVLModel(Qwen2Model):
    """Qwen-1's text with the tower."""

    config_class = QwenVLConfig

    def __init__(self, config: QwenVLConfig) -> None:
        super().__init__(config)
        self.visual = QwenVLVisionTransformer(config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **keywords: Any) -> Any:
        """Return the embeddings (I, Q, H) of images as `pooler_output`."""
        return BaseModelOutputWithPooling(pooler_output=self.visual(pixel_values))

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As Qwen2Model's, with images in the places of their placeholders."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if pixel_values is not None:
            seen = self.get_image_features(pixel_values).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, list(seen))
        return super().forward(inputs_embeds=inputs_embeds, **keywords)


class QwenVLForConditionalGeneration(Qwen2ForCausalLM):
    """The model with its head."""

    config_class = QwenVLConfig

    def __init__(self, config: QwenVLConfig) -> None:
        # Qwen2ForCausalLM would first make a model without images.
        PreTrainedModel.__init__(self, config)
        self.model = QwenVLModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **keywords: Any) -> Any:
        """As QwenVLModel's."""
        return self.model.get_image_features(pixel_values, **keywords)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        return made | ({"pixel_values": pixel_values} if is_first_iteration else {})


_QKV = [f".self_attn.{name}_proj" for name in "qkv"]
register_checkpoint_conversion_mapping(
    QwenVLForConditionalGeneration.__name__,
    [
        *(WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()),
        WeightConverter(".self_attn.fused", _QKV, [SplitEachHead()]),
        WeightConverter(".attn.c_attn", _QKV, [Chunk(dim=0)]),
    ],
    overwrite=True,
)
