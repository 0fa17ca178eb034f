"""GLM-4V-9B's model: EVA2's tower, whose norms follow attention and MLP, and transformers' GLM.

Groups of 2 x 2 patches are joined by a convolution and projected. A learned embedding before them and one after them
stand for the image's beginning and end. All patches of an image have the position after its beginning.

Shapes: B prompts, N positions, I images, P patches of an image and one more, V width of the tower, H hidden size,
E embeddings of an image.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GlmForCausalLM, GlmModel, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPMLP

from beheld.families._shared.modeling import SplitHeads, with_media
from beheld.families.glm4v_9b.config import GLM4VConfig, GLM4VVisionConfig

# The published name, or a part of it -> ours; applied in this order.
_NAMES = {
    r"transformer\.embedding\.word_embeddings\.": "model.embed_tokens.",
    r"transformer\.output_layer\.": "lm_head.",
    r"transformer\.encoder\.final_layernorm\.": "model.norm.",
    r"transformer\.encoder\.layers\.": "model.layers.",
    r"transformer\.vision\.": "model.vision.",
    r"(model\.layers\.\d+)\.self_attention\.dense\.": r"\1.self_attn.o_proj.",
    r"(model\.layers\.\d+)\.mlp\.dense_h_to_4h\.": r"\1.mlp.gate_up_proj.",
    r"(model\.layers\.\d+)\.mlp\.dense_4h_to_h\.": r"\1.mlp.down_proj.",
}


class GLM4VPatchEmbedding(nn.Module):
    """Patches after a learned first embedding, with learned positions."""

    def __init__(self, vision: GLM4VVisionConfig) -> None:
        super().__init__()
        width = vision.hidden_size
        self.proj = nn.Conv2d(vision.in_channels, width, vision.patch_size, stride=vision.patch_size)
        self.cls_embedding = nn.Parameter(torch.zeros(1, width))
        self.position_embedding = nn.Embedding(vision.num_positions, width)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(I, 3, side, side) -> (I, P, V)."""
        patches = self.proj(pixel_values).flatten(2).transpose(1, 2)
        first = self.cls_embedding.expand(len(patches), 1, -1)
        made: Tensor = torch.cat((first, patches), dim=1) + self.position_embedding.weight
        return made


class GLM4VHeads(nn.Module):
    """Attention of all patches of an image to each other."""

    def __init__(self, vision: GLM4VVisionConfig) -> None:
        super().__init__()
        self.num_heads = vision.num_heads
        self.query_key_value = nn.Linear(vision.hidden_size, 3 * vision.hidden_size)
        self.dense = nn.Linear(vision.hidden_size, vision.hidden_size)

    def forward(self, x_IPV: Tensor) -> Tensor:
        """(I, P, V) -> (I, P, V)."""
        q, k, v = self.query_key_value(x_IPV).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        made: Tensor = self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return made


class GLM4VTowerLayer(nn.Module):
    """Attention and MLP, each with a norm after it; the first norm has the name of one before."""

    def __init__(self, vision: GLM4VVisionConfig) -> None:
        super().__init__()
        width, eps = vision.hidden_size, vision.layer_norm_eps
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.attention = GLM4VHeads(vision)
        self.mlp = CLIPMLP(vision)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)

    def forward(self, x_IPV: Tensor) -> Tensor:
        """(I, P, V) -> (I, P, V)."""
        x_IPV = x_IPV + self.input_layernorm(self.attention(x_IPV))
        made: Tensor = x_IPV + self.post_attention_layernorm(self.mlp(x_IPV))
        return made


class GLM4VTransformer(PreTrainedModel):
    """The tower's layers."""

    config_class = GLM4VVisionConfig
    _supports_sdpa = True

    def __init__(self, vision: GLM4VVisionConfig) -> None:
        super().__init__(vision)
        self.layers = nn.ModuleList(GLM4VTowerLayer(vision) for _ in range(vision.num_hidden_layers))

    def forward(self, x_IPV: Tensor) -> Tensor:
        """(I, P, V) -> (I, P, V)."""
        for layer in self.layers:
            x_IPV = layer(x_IPV)
        return x_IPV


class GLM4VProjector(nn.Module):
    """A linear layer and a gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_proj = nn.Linear(hidden, hidden, bias=False)
        self.norm1 = nn.LayerNorm(hidden)
        self.dense_h_to_4h, self.gate_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.dense_4h_to_h = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        x = F.gelu(self.norm1(self.linear_proj(x)))
        made: Tensor = self.dense_4h_to_h(F.silu(self.gate_proj(x)) * self.dense_h_to_4h(x))
        return made


class GLM4VTower(nn.Module):
    """Tower, convolution and projector."""

    def __init__(self, config: GLM4VConfig) -> None:
        super().__init__()
        vision, hidden = config.vision_config, config.hidden_size
        self.side, self.scaling_factor = vision.side, vision.scaling_factor
        self.patch_embedding = GLM4VPatchEmbedding(vision)
        self.transformer = GLM4VTransformer(vision)
        self.conv = nn.Conv2d(vision.hidden_size, hidden, 2, stride=2)
        self.linear_proj = GLM4VProjector(hidden, config.intermediate_size)
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, hidden)) for _ in range(2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the embeddings (I, E, H) of images (I, 3, side, side), with those of their beginning and end."""
        x_IPV = self.transformer(self.patch_embedding(pixel_values.to(self.boi.dtype)))
        grid = x_IPV[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        patches = self.linear_proj(self.conv(grid).flatten(2).transpose(1, 2))
        before, after = (part.expand(len(patches), -1, -1) for part in (self.boi, self.eoi))
        made: Tensor = torch.cat((before, patches, after), dim=1) / self.scaling_factor
        return made


class GLM4VModel(GlmModel):
    """GLM with the tower."""

    config_class = GLM4VConfig

    def __init__(self, config: GLM4VConfig) -> None:
        super().__init__(config)
        self.vision = GLM4VTower(config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **keywords: Any) -> Any:
        """Return the embeddings of images as `pooler_output`."""
        return BaseModelOutputWithPooling(pooler_output=self.vision(pixel_values))

    def image_places(self, input_ids: Tensor) -> Tensor:
        """Return 1 at the tokens of images, their beginning and end included, and 0 at others, of ids (B, N)."""
        count, ids = self.config.vision_config.num_embeds, self.config
        places = torch.zeros_like(input_ids)
        for row, start in (input_ids == ids.boi_token_id).nonzero().tolist():
            part = input_ids[row, start : start + count]
            inner = part[1:-1] == ids.image_token_id
            if len(part) == count and part[-1] == ids.eoi_token_id and bool(inner.all()):
                places[row, start : start + count] = 1
        return places

    def get_rope_index(
        self, input_ids: Tensor, mm_token_type_ids: Tensor | None = None, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Return positions (1, B, N), equal for all patches of an image, and what is added to later positions (B, 1).

        Args:
            input_ids: (B, N).
            mm_token_type_ids: (B, N), not 0 at the tokens of images; None finds them by their ids.
        """
        places = self.image_places(input_ids) if mm_token_type_ids is None else mm_token_type_ids
        seen = F.pad(places != 0, (1, 1))
        patches = F.pad(seen[:, :-2] & seen[:, 1:-1] & seen[:, 2:], (1, 0))
        positions = (~(patches[:, 1:] & patches[:, :-1])).long().cumsum(-1) - 1
        return positions[None], positions[:, -1:] + 1 - input_ids.shape[1]

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As GlmModel's, with images in their places."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if pixel_values is not None:
            assert input_ids is not None
            seen = self.get_image_features(pixel_values).pooler_output
            inputs_embeds = with_media(inputs_embeds, self.image_places(input_ids), 1, list(seen))
        return super().forward(inputs_embeds=inputs_embeds, **keywords)


class GLM4VForCausalLM(GlmForCausalLM):
    """The model with its head."""

    config_class = GLM4VConfig
    # What follows from the configuration.
    _keys_to_ignore_on_load_unexpected = [r"rotary_pos_emb\.inv_freq"]  # noqa: RUF012

    def __init__(self, config: GLM4VConfig) -> None:
        # GlmForCausalLM would first make a model without images.
        PreTrainedModel.__init__(self, config)
        self.model = GLM4VModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, **keywords: Any) -> Any:
        """As GLM4VModel's."""
        return self.model.get_image_features(pixel_values, **keywords)

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """Positions of prompts with images repeat; generate() counts on from the last."""
        if model_kwargs.get("pixel_values") is None:
            parent: Any = super()
            plain: Tensor = parent._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
            return plain
        return self.model.get_rope_index(inputs_tensor)[0][0]

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
    GLM4VForCausalLM.__name__,
    [
        *(WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()),
        WeightConverter(".self_attention.query_key_value", _QKV, [SplitHeads()]),
    ],
    overwrite=True,
)
