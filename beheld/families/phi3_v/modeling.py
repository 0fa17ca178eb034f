"""Phi-3-vision's model: CLIP's patches, joined two by two, in lines, projected into transformers' Phi-3.

The lines of the tiles and of the overview each end with a learned separator (`sub_GN`), and another (`glb_GN`) stands
between the two.

Shapes: I images, N tiles of all images, overviews included, V width of the tower, H hidden size, E embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionModel, Phi3ForCausalLM, Phi3Model, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from beheld.families._shared.modeling import with_media
from beheld.families.phi3_v.config import Phi3VConfig


class Phi3VTower(nn.Module):
    """CLIP's tower under the published name, without the layers after the features."""

    def __init__(self, config: Phi3VConfig) -> None:
        super().__init__()
        self.depth = config.num_tower_layers
        self.vision_model = CLIPVisionModel(config.vision_config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the patches' features (N, patches, V) of tiles (N, 3, side, side)."""
        x_NPV = self.vision_model.pre_layrnorm(self.vision_model.embeddings(pixel_values))
        for layer in self.vision_model.encoder.layers[: self.depth]:
            x_NPV = layer(x_NPV, attention_mask=None)
        features: Tensor = x_NPV[:, 1:]
        return features


class Phi3VImageEmbedding(nn.Module):
    """Tower, separators and projection."""

    def __init__(self, config: Phi3VConfig) -> None:
        super().__init__()
        joined, hidden = 4 * config.vision_config.hidden_size, config.hidden_size
        self.side = config.vision_config.image_size
        self.img_processor = Phi3VTower(config)
        self.glb_GN = nn.Parameter(torch.zeros(1, 1, joined))
        self.sub_GN = nn.Parameter(torch.zeros(1, 1, 1, joined))
        self.img_projection = nn.Sequential(nn.Linear(joined, hidden), nn.GELU(), nn.Linear(hidden, hidden))

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> list[Tensor]:
        """Return the embeddings (E, H) of each image.

        Args:
            pixel_values: (N, 3, side, side), of each image the overview first.
            image_sizes: (I, 2), height and width in pixels of each image's tiles together.
        """
        features = self.img_processor(pixel_values.to(self.glb_GN.dtype))
        grids = [(int(height) // self.side, int(width) // self.side) for height, width in image_sizes.tolist()]
        images = features.split([1 + rows * columns for rows, columns in grids])
        lines = [
            torch.cat((self._lines(image[1:], *grid), self.glb_GN[0], self._lines(image[:1], 1, 1)))
            for image, grid in zip(images, grids, strict=True)
        ]
        embeds: Tensor = self.img_projection(torch.cat(lines))
        return list(embeds.split([len(image) for image in lines]))

    def _lines(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """Return the joined patches of a grid of tiles (rows * columns, patches, V), each line with its separator."""
        half = int(tiles.shape[1] ** 0.5) // 2
        grid = tiles.reshape(rows, columns, half, 2, half, 2, -1)
        joined = grid.permute(0, 2, 1, 4, 3, 5, 6).reshape(rows * half, columns * half, -1)
        ends = self.sub_GN[0].expand(rows * half, -1, -1)
        return torch.cat((joined, ends), dim=1).flatten(0, 1)


class Phi3VModel(Phi3Model):
    """Phi-3 with the image embedding."""

    config_class = Phi3VConfig

    def __init__(self, config: Phi3VConfig) -> None:
        super().__init__(config)
        self.vision_embed_tokens = Phi3VImageEmbedding(config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """Return the embeddings of each image as `pooler_output`."""
        embeds: Any = self.vision_embed_tokens(pixel_values, image_sizes)
        return BaseModelOutputWithPooling(pooler_output=embeds)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As Phi3Model's, with images in the places of their placeholders."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if pixel_values is not None:
            assert image_sizes is not None
            seen = self.get_image_features(pixel_values, image_sizes).pooler_output
            inputs_embeds = with_media(inputs_embeds, input_ids, self.config.image_token_id, seen)
        return super().forward(inputs_embeds=inputs_embeds, **keywords)


class Phi3VForCausalLM(Phi3ForCausalLM):
    """The model with its head."""

    config_class = Phi3VConfig

    def __init__(self, config: Phi3VConfig) -> None:
        # Phi3ForCausalLM would first make a model without images.
        PreTrainedModel.__init__(self, config)
        self.model = Phi3VModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """As Phi3VModel's."""
        return self.model.get_image_features(pixel_values, image_sizes, **keywords)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        return made | ({"pixel_values": pixel_values, "image_sizes": image_sizes} if is_first_iteration else {})
