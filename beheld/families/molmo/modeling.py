"""Molmo's model: the features of two layers of CLIP, pooled two by two by attention, added to the patches' token.

Shapes: I images, C crops of all images, P patches of a crop, V width of the tower, W width of the features of all
layers, H hidden size, E embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPVisionConfig, PreTrainedModel, Qwen2ForCausalLM, Qwen2Model
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPPreTrainedModel

from beheld.families._shared.modeling import SplitHeads, with_media
from beheld.families.molmo.config import ADDED, MolmoConfig

_TOWER = "model.vision_backbone.image_vit"
# The published name, or a part of it -> ours; applied in this order.
_NAMES = {
    r"model\.transformer\.blocks\.": "model.layers.",
    r"model\.transformer\.ln_f\.": "model.norm.",
    r"model\.transformer\.ff_out\.": "lm_head.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"(layers\.\d+)\.ff_out\.": r"\1.mlp.down_proj.",
    r"image_vit\.transformer\.resblocks\.": "image_vit.layers.",
    r"\.attention\.wq\.": ".self_attn.q_proj.",
    r"\.attention\.wk\.": ".self_attn.k_proj.",
    r"\.attention\.wv\.": ".self_attn.v_proj.",
    r"\.attention\.wo\.": ".self_attn.out_proj.",
    r"\.feed_forward\.w1\.": ".mlp.fc1.",
    r"\.feed_forward\.w2\.": ".mlp.fc2.",
    r"\.attention_norm\.": ".layer_norm1.",
    r"\.ffn_norm\.": ".layer_norm2.",
}


class MolmoVisionTransformer(CLIPPreTrainedModel):
    """CLIP's tower for patches that are already cut, without its last layer and norm."""

    def __init__(self, vision: CLIPVisionConfig, chosen: Sequence[int]) -> None:
        super().__init__(vision)
        self.chosen = tuple(chosen)
        side: Any = vision.image_size
        patch: Any = vision.patch_size
        patches = (side // patch) ** 2
        self.class_embedding = nn.Parameter(torch.zeros(vision.hidden_size))
        self.positional_embedding = nn.Parameter(torch.zeros(1 + patches, vision.hidden_size))
        self.patch_embedding = nn.Linear(3 * patch**2, vision.hidden_size, bias=False)
        self.pre_ln = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.layers = nn.ModuleList(CLIPEncoderLayer(vision) for _ in range(vision.num_hidden_layers))

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the features (C, P, W) of patches (C, P, pixels)."""
        x_CPV = self.patch_embedding(pixel_values)
        first = self.class_embedding.expand(len(x_CPV), 1, -1)
        x_CPV = self.pre_ln(torch.cat((first, x_CPV), dim=1) + self.positional_embedding)
        states = []
        for layer in self.layers:
            x_CPV = layer(x_CPV, attention_mask=None)
            states.append(x_CPV[:, 1:])
        return torch.cat([states[index] for index in self.chosen], dim=-1)


class MolmoPooling(nn.Module):
    """Attention of the mean of some features to each of them."""

    def __init__(self, width: int, heads: int, inputs: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(inputs, width) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """(windows, features of a window, W) -> (windows, V)."""
        query = features.mean(1, keepdim=True)
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.wq, query), (self.wk, features), (self.wv, features))
        )
        pooled: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).flatten(1))
        return pooled


class MolmoProjector(nn.Module):
    """A gated MLP."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(inputs, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., V) -> (..., H)."""
        made: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return made


class MolmoVisionBackbone(nn.Module):
    """Tower, pooling and projector."""

    def __init__(self, config: MolmoConfig) -> None:
        super().__init__()
        vision = config.vision_config
        width = vision.hidden_size * len(config.vit_layers)
        self.side = vision.image_size // vision.patch_size
        self.image_vit = MolmoVisionTransformer(vision, config.vit_layers)
        self.pad_embed = nn.Parameter(torch.zeros(2, width))
        self.image_pooling_2d = MolmoPooling(vision.hidden_size, vision.num_attention_heads, width)
        self.image_projector = MolmoProjector(vision.hidden_size, config.intermediate_size, config.hidden_size)

    def forward(self, pixel_values: Tensor, image_masks: Tensor, pooled_order: Tensor, sizes: Tensor) -> list[Tensor]:
        """Return what is added to the patches' token (E, H), for each image.

        Args:
            pixel_values: (C, P, pixels), of each image the overview first.
            image_masks: (C, P), the share of each patch that is not padding.
            pooled_order: (E of all images,), the pooled windows of an image's crops in the order of its prompt.
            sizes: (I, 2), of each image the number of crops and of embeddings.
        """
        counts, lengths = zip(*sizes.tolist(), strict=True)
        features = self.image_vit(pixel_values.to(self.pad_embed.dtype))
        whole = image_masks == 0
        partial = (image_masks < 1) & ~whole
        features = features + self.pad_embed[0] * whole[..., None].to(features)
        features = features + self.pad_embed[1] * partial[..., None].to(features)
        grid = features.unflatten(1, (self.side, self.side))
        if self.side % 2:
            grid = F.pad(grid, (0, 0, 0, 1, 0, 1))
        half = grid.shape[1] // 2
        windows = grid.unflatten(2, (half, 2)).unflatten(1, (half, 2)).transpose(2, 3).flatten(3, 4)
        pooled = self.image_projector(self.image_pooling_2d(windows.flatten(0, 2)))
        images = pooled.split([count * half * half for count in counts])
        return [image[own] for image, own in zip(images, pooled_order.split(lengths), strict=True)]


class MolmoModel(Qwen2Model):
    """Qwen 2 with a longer table of embeddings and the vision backbone."""

    config_class = MolmoConfig

    def __init__(self, config: MolmoConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.embedding_size + ADDED, config.hidden_size)
        self.vision_backbone = MolmoVisionBackbone(config)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, image_masks: Tensor, pooled_order: Tensor, sizes: Tensor, **keywords: Any
    ) -> Any:
        """Return the embeddings of each image's patches, their token's included, as `pooler_output`."""
        parts = self.vision_backbone(pixel_values, image_masks, pooled_order, sizes)
        token = self.embed_tokens.weight[self.config.image_token_id]
        embeds: Any = [token + part.to(token.dtype) for part in parts]
        return BaseModelOutputWithPooling(pooler_output=embeds)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_masks: Tensor | None = None,
        pooled_order: Tensor | None = None,
        sizes: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As Qwen2Model's, with images in the places of their patches' token."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if pixel_values is not None:
            assert image_masks is not None
            assert pooled_order is not None
            assert sizes is not None
            seen = self.get_image_features(pixel_values, image_masks, pooled_order, sizes).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, seen)
        return super().forward(inputs_embeds=inputs_embeds, **keywords)


class MolmoForCausalLM(Qwen2ForCausalLM):
    """The model with its head, which does not know the second part of the vocabulary."""

    config_class = MolmoConfig

    def __init__(self, config: MolmoConfig) -> None:
        # Qwen2ForCausalLM would first make a model without images.
        PreTrainedModel.__init__(self, config)
        self.model = MolmoModel(config)
        self.vocab_size = config.embedding_size
        self.lm_head = nn.Linear(config.hidden_size, config.embedding_size, bias=False)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, image_masks: Tensor, pooled_order: Tensor, sizes: Tensor, **keywords: Any
    ) -> Any:
        """As MolmoModel's."""
        return self.model.get_image_features(pixel_values, image_masks, pooled_order, sizes, **keywords)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        image_masks: Tensor | None = None,
        pooled_order: Tensor | None = None,
        sizes: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {"pixel_values": pixel_values, "image_masks": image_masks, "pooled_order": pooled_order, "sizes": sizes}
        return made | (media if is_first_iteration else {})


_QKV = [f".self_attn.{name}_proj" for name in "qkv"]
register_checkpoint_conversion_mapping(
    MolmoForCausalLM.__name__,
    [
        *(WeightRenaming(theirs, ours) for theirs, ours in _NAMES.items()),
        WeightConverter(
            ["model.transformer.wte.embedding", "model.transformer.wte.new_embedding"],
            "model.embed_tokens.weight",
            [Concatenate(dim=0)],
        ),
        WeightConverter(".att_proj", _QKV, [SplitHeads()]),
        WeightConverter(".ff_proj", [".mlp.up_proj", ".mlp.gate_proj"], [Chunk(dim=0)]),
    ],
    overwrite=True,
)
