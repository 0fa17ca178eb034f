"""MiniCPM-V's model: a tower over slices of any shape, a resampler, and a text model of transformers.

Shapes: S slices of all images, I images, P patches of all slices, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling

from beheld.families._shared.modeling import HeadedModel, Unbatched, with_media
from beheld.families.minicpmv.config import MiniCPMVConfig
from beheld.families.minicpmv.towers import Grid, MiniCPMVResampler, MiniCPMVTower


class ScaledEmbedding(nn.Embedding):
    """Embeddings of tokens that are multiplied by a factor; those of images are not."""

    def __init__(self, rows: int, width: int, scale: float) -> None:
        super().__init__(rows, width)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled embeddings of ids."""
        return super().forward(input) * self.scale


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
        self.language_model = getattr(transformers, config.facts.text)(config)
        if config.scale_emb != 1:
            scaled = ScaledEmbedding(config.vocab_size, config.hidden_size, config.scale_emb)
            self.language_model.set_input_embeddings(scaled)
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
        counts = num_slices.tolist()
        slices = pixel_values.split([rows * columns for rows, columns in grids])
        found: dict[int, Tensor] = {}
        shapes = self._shapes(grids, counts)
        for shape, grid in dict.fromkeys(zip(shapes, grids, strict=True)):
            own = [index for index, other in enumerate(zip(shapes, grids, strict=True)) if other == (shape, grid)]
            count = grid[0] * grid[1]
            filled = pad(torch.stack([slices[index] for index in own]), (0,) * 7 + (shape[0] * shape[1] - count,))
            embeds = self.resampler(self.vpm(filled, shape)[:, :count], grid)
            found |= dict(zip(own, embeds, strict=True))
        images = torch.cat([found[index] for index in range(len(grids))]).split(
            [count * self.config.query_num for count in counts]
        )
        return BaseModelOutputWithPooling(pooler_output=images)

    def _shapes(self, grids: list[Grid], counts: list[int]) -> list[Grid]:
        """Return the grids that the tower sees of slices of `grids`, of images of `counts` slices.

        In version 2.5 it sees a row. As in the published code, patches of zeros fill the rows of an image up to its
        longest, and are seen by the others.
        """
        if self.config.facts.patches != "in a row":
            return grids
        lengths = [rows * columns for rows, columns in grids]
        if self.config.batch_vision_input:
            images = [lengths[sum(counts[:index]) :][:count] for index, count in enumerate(counts)]
            lengths = [max(image) for image in images for _ in image]
        return [(1, length) for length in lengths]

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        tgt_sizes: Tensor | None = None,
        num_slices: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As the text model's, with images and frames in the places of their placeholders, in the prompt's order."""
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
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MiniCPMVConfig) -> None:
        super().__init__(config)
        self.model = self.core_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, hidden: Tensor) -> Tensor:
        """As HeadedModel's; version 2.0 divides the hidden states."""
        return super().logits(hidden / getattr(self.config, "logits_scaling", 1))

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


_LAYERS = r"model.vpm.encoder.layers.\1"
# Version 2.0's tower has the names of another library; its queries, keys and values are one matrix.
FIRST_NAMES = {
    r"^vpm\.patch_embed\.proj\.": "model.vpm.embeddings.patch_embedding.",
    r"^vpm\.norm\.": "model.vpm.post_layernorm.",
    r"^vpm\.blocks\.(\d+)\.norm1\.": f"{_LAYERS}.layer_norm1.",
    r"^vpm\.blocks\.(\d+)\.norm2\.": f"{_LAYERS}.layer_norm2.",
    r"^vpm\.blocks\.(\d+)\.mlp\.": f"{_LAYERS}.mlp.",
    r"^vpm\.blocks\.(\d+)\.attn\.proj\.": f"{_LAYERS}.self_attn.out_proj.",
    r"^vpm\.blocks\.(\d+)\.attn\.qkv\.": f"{_LAYERS}.self_attn.qkv.",
}

register_checkpoint_conversion_mapping(
    MiniCPMVForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^llm\.lm_head\.", "lm_head."),
        WeightRenaming(r"^llm\.model\.", "model.language_model."),
        *(WeightRenaming(theirs, ours) for theirs, ours in FIRST_NAMES.items()),
        WeightConverter("vpm.pos_embed", "model.vpm.embeddings.position_embedding.weight", [Unbatched()]),
        WeightConverter("self_attn.qkv", [f"self_attn.{part}_proj" for part in "qkv"], [Chunk(dim=0)]),
        WeightRenaming(r"^vpm\.", "model.vpm."),
        WeightRenaming(r"^resampler\.", "model.resampler."),
    ],
    overwrite=True,
)
