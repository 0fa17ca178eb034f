"""Models with DeepSeek's text, which read images in views.

An image has an overview and, if it is cut, tiles. The lines of the overview and those of the joined tiles each end with
a learned embedding (`image_newline`); another (`view_seperator`, as it is published) separates the two.

Shapes: I images, N tiles of all images, P embeddings of a view, H hidden size, E embeddings of an image.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Model, DeepseekV3Model, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel

from beheld.families._shared.deepseek.config import ViewsConfig
from beheld.families._shared.modeling import HeadedModel, with_media

# The configuration's model type -> the text model.
_TEXTS: dict[str, Any] = {
    "deepseek_ocr2_text": DeepseekOcr2TextModel,
    "deepseek_v2": DeepseekV2Model,
    "deepseek_v3": DeepseekV3Model,
}
_EXPERTS = "mlp.experts"
# The stored experts, one by one, to one matrix for all.
EXPERTS: list[WeightConverter | WeightRenaming] = [
    WeightConverter(
        [f"{_EXPERTS}.*.gate_proj.weight", f"{_EXPERTS}.*.up_proj.weight"],
        f"{_EXPERTS}.gate_up_proj",
        [MergeModulelist(dim=0), Concatenate(dim=1)],
    ),
    WeightConverter(f"{_EXPERTS}.*.down_proj.weight", f"{_EXPERTS}.down_proj", [MergeModulelist(dim=0)]),
]


class ViewsPreTrainedModel(PreTrainedModel):
    """What transformers' loader and its attention interface require of a model."""

    config_class = ViewsConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class ViewsModel(ViewsPreTrainedModel):
    """The text model and the embeddings of lines; a subclass has the tower and the projector."""

    def __init__(self, config: ViewsConfig) -> None:
        super().__init__(config)
        self.language_model = _TEXTS[config.text_config.model_type](config.text_config)
        self.image_newline = nn.Parameter(torch.zeros(config.text_config.hidden_size))
        self.view_seperator = nn.Parameter(torch.zeros(config.text_config.hidden_size))

    def views(self, pixels: Tensor) -> Tensor:
        """Return the embeddings (views, P, H) of views (views, 3, side, side); a subclass defines it."""
        raise NotImplementedError

    def joined(self, overview: Tensor, tiles: Tensor) -> Tensor:
        """Return the embeddings (E, H) of an image, of the lines of both; a subclass defines it."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        """Return the text's embeddings."""
        return self.language_model.get_input_embeddings()

    def get_image_features(
        self, pixel_values: Tensor, pixel_values_local: Tensor, grids: Tensor, **keywords: Any
    ) -> Any:
        """Return the embeddings of each image as `pooler_output`.

        Args:
            pixel_values: overviews (I, 3, side, side).
            pixel_values_local: tiles (N, 3, side, side), image by image and row by row.
            grids: (I, 2), columns and rows of tiles; zeros for an image that is not cut.
        """
        sizes = [(columns, rows) for columns, rows in grids.tolist()]
        overviews, tiles = pixel_values, pixel_values_local
        if overviews.shape[1:] == tiles.shape[1:]:
            overviews, tiles = self.views(torch.cat((overviews, tiles))).split((len(overviews), len(tiles)))
        else:
            overviews = self.views(overviews)
            tiles = self.views(tiles) if len(tiles) else overviews[:0]
        cut = tiles.split([columns * rows for columns, rows in sizes])
        embeds: Any = [
            self.joined(self._lines(overview[None], (1, 1)), self._lines(own, size))
            for overview, own, size in zip(overviews, cut, sizes, strict=True)
        ]
        return BaseModelOutputWithPooling(pooler_output=embeds)

    def _lines(self, views: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the embeddings of a grid (columns, rows) of views (views, P, H), each line with its end."""
        columns, rows = grid
        if not columns * rows:
            return views.flatten(0, 1)
        side = int(views.shape[1] ** 0.5)
        whole = views.reshape(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        ends = self.image_newline.expand(rows * side, 1, -1)
        return torch.cat((whole, ends), dim=1).flatten(0, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_local: Tensor | None = None,
        grids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As the text model's, with images in the places of their placeholders."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert pixel_values_local is not None
            assert grids is not None
            seen = self.get_image_features(pixel_values, pixel_values_local, grids).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, seen)
        return self.language_model(inputs_embeds=inputs_embeds, **keywords)


class ViewsForCausalLM(ViewsPreTrainedModel, HeadedModel):
    """The model with its head; a subclass names the class of `model`."""

    inner: ClassVar[type[ViewsModel]]

    def __init__(self, config: ViewsConfig) -> None:
        super().__init__(config)
        self.model = self.inner(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, pixel_values_local: Tensor, grids: Tensor, **keywords: Any
    ) -> Any:
        """As ViewsModel's."""
        return self.model.get_image_features(pixel_values, pixel_values_local, grids)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        pixel_values_local: Tensor | None = None,
        grids: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {"pixel_values": pixel_values, "pixel_values_local": pixel_values_local, "grids": grids}
        return made | (media if is_first_iteration else {})
