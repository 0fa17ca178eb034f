"""MiniCPM-V's model: SigLIP's layers over slices of any shape, a resampler, and transformers' Qwen2.

Shapes: S slices of all images, I images, P patches of all slices, V width of the tower, H hidden size, Q queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Model
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.siglip.modeling_siglip import SiglipEncoder

from beheld.families._shared.modeling import HeadedModel, with_media
from beheld.families.minicpmv.config import MiniCPMVConfig

Grid = tuple[int, int]


class MiniCPMVEmbeddings(nn.Module):
    """Patches with learned positions, which are spread over each slice whatever its shape."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.side = config.image_size // config.patch_size
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.position_embedding = nn.Embedding(self.side**2, config.hidden_size)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return (slices, patches, V) of patches (slices, patches, 3, side, side) of one grid (rows, columns)."""
        x_NV = self.patch_embedding(pixels.flatten(0, 1).to(self.patch_embedding.weight.dtype)).flatten(1)
        rows, columns = (self._buckets(count, pixels.device) for count in grid)
        places = (rows[:, None] * self.side + columns).flatten()
        return x_NV.unflatten(0, pixels.shape[:2]) + self.position_embedding(places)

    def _buckets(self, count: int, device: Any) -> Tensor:
        """Return the learned position of each of `count` patches along one axis."""
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side)
        places = torch.arange(0, 1 - 1e-6, 1 / count)
        return torch.bucketize(places, bounds, right=True).to(device)


class MiniCPMVTower(nn.Module):
    """The tower under its published name."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.embeddings = MiniCPMVEmbeddings(vision)
        self.encoder = SiglipEncoder(vision)
        if config.drop_vision_last_layer:
            self.encoder.layers = self.encoder.layers[:-1]
        self.post_layernorm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """Return the features (slices, patches, V) of slices of one grid."""
        x_SPV = self.encoder(inputs_embeds=self.embeddings(pixels, grid)).last_hidden_state
        features: Tensor = self.post_layernorm(x_SPV)
        return features


class MiniCPMVResampler(nn.Module):
    """Queries that attend to a slice's features, whose keys have sinusoidal positions of both axes."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__()
        width, hidden = config.vision_config.hidden_size, config.hidden_size
        self.query = nn.Parameter(torch.zeros(config.query_num, hidden))
        self.kv_proj = nn.Linear(width, hidden, bias=False) if width != hidden else nn.Identity()
        self.attn = nn.MultiheadAttention(hidden, hidden // 128)
        self.ln_q = nn.LayerNorm(hidden, eps=1e-6)
        self.ln_kv = nn.LayerNorm(hidden, eps=1e-6)
        self.ln_post = nn.LayerNorm(hidden, eps=1e-6)
        self.proj = nn.Parameter(torch.zeros(hidden, hidden))

    def forward(self, features: Tensor, grid: Grid) -> Tensor:
        """Return the embeddings (slices, Q, H) of features (slices, patches, V) of one grid."""
        x_PSH = self.ln_kv(self.kv_proj(features)).transpose(0, 1)
        keys = x_PSH + self._positions(grid, x_PSH)[:, None]
        queries = self.ln_q(self.query)[:, None].expand(-1, len(features), -1)
        out = self.attn(queries, keys, x_PSH, need_weights=False)[0].transpose(0, 1)
        embeds: Tensor = self.ln_post(out) @ self.proj
        return embeds

    def _positions(self, grid: Grid, like: Tensor) -> Tensor:
        """Return sines and cosines (patches, H), of the column in the first half and of the row in the second."""
        rows, columns = grid
        quarter = like.shape[-1] // 4
        omega = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float32) / quarter)
        row, column = (torch.arange(count, dtype=torch.float32)[:, None] * omega for count in grid)
        row, column = (torch.cat((angle.sin(), angle.cos()), -1) for angle in (row, column))
        both = torch.cat((column.expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)), -1)
        return both.flatten(0, 1).to(like)


class MiniCPMVPreTrainedModel(PreTrainedModel):
    """What transformers' loader and its attention interface require of a model."""

    config_class = MiniCPMVConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class MiniCPMVModel(MiniCPMVPreTrainedModel):
    """Tower, resampler and text model."""

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config)
        self.vpm = MiniCPMVTower(config)
        self.resampler = MiniCPMVResampler(config)
        self.language_model = Qwen2Model(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the text's embeddings."""
        return self.language_model.get_input_embeddings()

    def get_image_features(self, pixel_values: Tensor, tgt_sizes: Tensor, num_slices: Tensor, **keywords: Any) -> Any:
        """Return the embeddings of each image, slice after slice, as `pooler_output`.

        Args:
            pixel_values: patches (P, 3, side, side) of all slices.
            tgt_sizes: (S, 2), rows and columns of patches of each slice.
            num_slices: (I,).
        """
        grids: list[Grid] = [(rows, columns) for rows, columns in tgt_sizes.tolist()]
        slices = pixel_values.split([rows * columns for rows, columns in grids])
        found: dict[int, Tensor] = {}
        for grid in dict.fromkeys(grids):
            own = [index for index, other in enumerate(grids) if other == grid]
            embeds = self.resampler(self.vpm(torch.stack([slices[index] for index in own]), grid), grid)
            found |= dict(zip(own, embeds, strict=True))
        images = torch.cat([found[index] for index in range(len(grids))]).split(
            [count * self.config.query_num for count in num_slices.tolist()]
        )
        return BaseModelOutputWithPooling(pooler_output=images)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        num_slices: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As Qwen2Model's, with images and frames in the places of their placeholders, in the prompt's order."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert tgt_sizes is not None
            assert num_slices is not None
            seen = self.get_image_features(pixel_values, tgt_sizes, num_slices).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, seen)
        return self.language_model(inputs_embeds=inputs_embeds, **keywords)


class MiniCPMVForConditionalGeneration(MiniCPMVPreTrainedModel, HeadedModel):
    """The model with its head; a subclass may have another core."""

    core_class: Any = MiniCPMVModel

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config)
        self.model = self.core_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, tgt_sizes: Tensor, num_slices: Tensor, **keywords: Any) -> Any:
        """As MiniCPMVModel's."""
        return self.model.get_image_features(pixel_values, tgt_sizes, num_slices)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        num_slices: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images and videos go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {"pixel_values": pixel_values, "tgt_sizes": tgt_sizes, "num_slices": num_slices}
        return made | (media if is_first_iteration else {})


register_checkpoint_conversion_mapping(
    MiniCPMVForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^llm\.lm_head\.", "lm_head."),
        WeightRenaming(r"^llm\.model\.", "model.language_model."),
        WeightRenaming(r"^vpm\.", "model.vpm."),
        WeightRenaming(r"^resampler\.", "model.resampler."),
    ],
    overwrite=True,
)
