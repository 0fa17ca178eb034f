"""The model of HyperCLOVA X SEED Vision: SigLIP, a C-Abstractor and Llama.

The C-Abstractor is that of "Honeybee" (arXiv 2312.06742): RegNet blocks before and after an adaptive pooling, which
decides the number of embeddings of a tile, then an MLP.

Shapes: T tiles of all items, I images, C canvases of all videos, P patches of a tile, V width of the tower, H hidden
size, Q embeddings of a tile.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.siglip.modeling_siglip import SiglipEncoder, SiglipPreTrainedModel

from beheld.families._shared.modeling import HeadedModel, with_media
from beheld.families.hyperclovax_vlm.config import Grid, HyperclovaxConfig, best_grid, margins

_DEPTH = 3
"""Blocks of each of the abstractor's stages."""


class HyperclovaxEmbeddings(nn.Module):
    """Patches of a tile with learned positions."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        patch, width = vision.patch_size, vision.hidden_size
        self.patch_embedding = nn.Conv2d(3, width, patch, patch)
        self.position_embedding = nn.Embedding((vision.image_size // patch) ** 2, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the states (T, P, V) of tiles (T, 3, side, side)."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class HyperclovaxTower(SiglipPreTrainedModel):
    """SigLIP up to the layer that is used, without a norm after it."""

    def __init__(self, config: HyperclovaxConfig) -> None:
        super().__init__(config.vision_config)
        self.embeddings = HyperclovaxEmbeddings(config.vision_config)
        self.encoder = SiglipEncoder(config.vision_config)
        layers, used = self.encoder.layers, config.use_nth_layer
        self.encoder.layers = layers[: used if used >= 0 else len(layers) + 1 + used]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the states (T, P, V) of tiles (T, 3, side, side)."""
        states: Tensor = self.encoder(inputs_embeds=self.embeddings(pixels)).last_hidden_state
        return states


class ChannelNorm(nn.LayerNorm):
    """A layer norm over the channels of an image (T, V, rows, columns)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized image."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class NormedConv(nn.Module):
    """A convolution without bias and its norm, under their published names."""

    def __init__(self, width: int, kernel: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=groups, bias=False)
        self.bn = ChannelNorm(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same shape."""
        normed: Tensor = self.bn(self.conv(x))
        return normed


class SqueezeExcitation(nn.Module):
    """Scales each channel by what the means of all channels say (arXiv 1709.01507)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = round(width / 4)
        self.fc1 = nn.Conv2d(width, inner, 1)
        self.fc2 = nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same shape."""
        means = x.mean((2, 3), keepdim=True)
        return x * self.fc2(nn.functional.silu(self.fc1(means))).sigmoid()


class RegNetBlock(nn.Module):
    """RegNet's bottleneck with one channel to a group (arXiv 2003.13678)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = NormedConv(width, 1)
        self.conv2 = NormedConv(width, 3, groups=width)
        self.se = SqueezeExcitation(width)
        self.conv3 = NormedConv(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same shape."""
        silu = nn.functional.silu
        return silu(x + self.conv3(self.se(silu(self.conv2(silu(self.conv1(x)))))))


class HyperclovaxAbstractor(nn.Module):
    """Makes embeddings of the tower's states, as many to a tile as a call says."""

    def __init__(self, config: HyperclovaxConfig) -> None:
        super().__init__()
        vision, hidden = config.vision_config, config.text_config.hidden_size
        width, patches = vision.hidden_size, (vision.image_size // vision.patch_size) ** 2
        self.pos_emb = nn.Parameter(torch.zeros(1, patches, width)) if config.proj_pos_emb else None
        self.prenorm = nn.LayerNorm(width, eps=1e-6) if config.proj_prenorm else nn.Identity()
        # The entry between the stages is the pooling, which has no weights.
        self.net = nn.Sequential(_stage(width), nn.Identity(), _stage(width))
        self.readout = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def spread(self, states: Tensor) -> Tensor:
        """Return the first stage's image (T, V, side, side) of states (T, P, V)."""
        states = self.prenorm(states)
        if self.pos_emb is not None:
            states = states + self.pos_emb
        side = math.isqrt(states.shape[1])
        image: Tensor = self.net[0](states.transpose(1, 2).unflatten(2, (side, side)))
        return image

    def pooled(self, image: Tensor, queries: int) -> Tensor:
        """Return the embeddings (T, Q, H) of the first stage's image (T, V, side, side)."""
        small = nn.functional.adaptive_avg_pool2d(image, math.isqrt(queries))
        embeds: Tensor = self.readout(self.net[2](small).flatten(2).transpose(1, 2))
        return embeds


def _stage(width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"b{number}", RegNetBlock(width)) for number in range(1, 1 + _DEPTH)))


class HyperclovaxPreTrainedModel(PreTrainedModel):
    """What transformers' loader and its attention interface require of a model."""

    config_class = HyperclovaxConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class HyperclovaxModel(HyperclovaxPreTrainedModel):
    """Tower, abstractor and text model."""

    def __init__(self, config: HyperclovaxConfig) -> None:
        super().__init__(config)
        self.vision_model = HyperclovaxTower(config)
        self.mm_projector = HyperclovaxAbstractor(config)
        self.image_newline = nn.Parameter(torch.zeros(config.text_config.hidden_size))
        self.language_model = LlamaModel(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the text's embeddings."""
        return self.language_model.get_input_embeddings()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """Return the embeddings of each image as `pooler_output`: of its overview, then of its tiles row by row.

        Args:
            pixel_values: (T, 3, side, side), of each image the overview first.
            image_sizes: (I, 2), width and height in pixels.
        """
        config = self.config
        sizes: list[Grid] = [(width, height) for width, height in image_sizes.tolist()]
        grids = [best_grid(size, config.resolutions, config.vision_config.image_size) for size in sizes]
        spread = self.mm_projector.spread(self.vision_model(pixel_values))
        embeds_TQH = self.mm_projector.pooled(spread, config.num_queries_vis_abstractor_image)
        parts = embeds_TQH.split([1 + rows * columns for rows, columns in grids])
        images: Any = [
            torch.cat((part[0], self._joined(part[1:], size, grid)))
            for part, size, grid in zip(parts, sizes, grids, strict=True)
        ]
        return BaseModelOutputWithPooling(pooler_output=images)

    def _joined(self, tiles_TQH: Tensor, size: Grid, grid: Grid) -> Tensor:
        """Return the embeddings of tiles as one image without padding, with a newline after each row."""
        side = math.isqrt(tiles_TQH.shape[1])
        whole = tiles_TQH.unflatten(1, (side, side)).unflatten(0, grid).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        rows, columns = whole.shape[:2]
        top, left = margins(size, rows, columns)
        whole = whole[top : rows - top, left : columns - left]
        newlines = self.image_newline.to(whole).expand(len(whole), 1, -1)
        return torch.cat((whole, newlines), dim=1).flatten(0, 1)

    def get_video_features(
        self, pixel_values_videos: Tensor, video_canvas_tiles: Tensor, video_num_canvases: Tensor, **keywords: Any
    ) -> Any:
        """Return the embeddings of each video as `pooler_output`, tile after tile.

        Args:
            pixel_values_videos: (T, 3, side, side).
            video_canvas_tiles: (C,), tiles of each canvas.
            video_num_canvases: of each video.
        """
        config = self.config
        counts: list[int] = video_canvas_tiles.tolist()
        spread = self.mm_projector.spread(self.vision_model(pixel_values_videos))
        is_slow = [index == 0 for count in counts for index in range(count)]
        slow, fast = ([index for index, first in enumerate(is_slow) if first is kind] for kind in (True, False))
        found: dict[int, Tensor] = {}
        for own, queries in (
            (slow, config.num_queries_vis_abstractor_video_slow),
            (fast, config.num_queries_vis_abstractor_video_fast),
        ):
            if own:
                found |= dict(zip(own, self.mm_projector.pooled(spread[own], queries), strict=True))
        videos: Any = []
        tile = canvas = 0
        for canvases in video_num_canvases.tolist():
            count = sum(counts[canvas : canvas + canvases])
            videos.append(torch.cat([found[index] for index in range(tile, tile + count)]))
            tile, canvas = tile + count, canvas + canvases
        return BaseModelOutputWithPooling(pooler_output=videos)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_canvas_tiles: Tensor | None = None,
        video_num_canvases: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        """As LlamaModel's, with images and videos in the places of their placeholders."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        seen: dict[int, Any] = {}
        if pixel_values is not None:
            assert image_sizes is not None
            seen[self.config.image_token_id] = self.get_image_features(pixel_values, image_sizes)
        if pixel_values_videos is not None:
            assert video_canvas_tiles is not None
            assert video_num_canvases is not None
            found = self.get_video_features(pixel_values_videos, video_canvas_tiles, video_num_canvases)
            seen[self.config.video_token_id] = found
        for token, result in seen.items():
            inputs_embeds = with_media(inputs_embeds, input_ids, token, result.pooler_output)
        return self.language_model(inputs_embeds=inputs_embeds, **keywords)


class HyperclovaxForConditionalGeneration(HyperclovaxPreTrainedModel, HeadedModel):
    """The model with its head."""

    # Published, and unused: what follows the tower's layer that is used.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"vision_model\.encoder\.layers\.",
        r"vision_model\.post_layernorm\.",
        r"vision_model\.head\.",
    ]
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HyperclovaxConfig) -> None:
        super().__init__(config)
        self.model = HyperclovaxModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_sizes: Tensor, **keywords: Any) -> Any:
        """As HyperclovaxModel's."""
        return self.model.get_image_features(pixel_values, image_sizes)

    def get_video_features(
        self, pixel_values_videos: Tensor, video_canvas_tiles: Tensor, video_num_canvases: Tensor, **keywords: Any
    ) -> Any:
        """As HyperclovaxModel's."""
        return self.model.get_video_features(pixel_values_videos, video_canvas_tiles, video_num_canvases)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        *arguments: Any,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_canvas_tiles: Tensor | None = None,
        video_num_canvases: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Images and videos go in with the prompt alone."""
        kwargs["is_first_iteration"] = is_first_iteration
        parent: Any = super()
        made: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *arguments, **kwargs)
        media = {
            "pixel_values": pixel_values,
            "image_sizes": image_sizes,
            "pixel_values_videos": pixel_values_videos,
            "video_canvas_tiles": video_canvas_tiles,
            "video_num_canvases": video_num_canvases,
        }
        return made | (media if is_first_iteration else {})


register_checkpoint_conversion_mapping(
    HyperclovaxForConditionalGeneration.__name__,
    [
        WeightRenaming(r"^language_model\.lm_head\.", "lm_head."),
        WeightRenaming(r"^language_model\.model\.", "model.language_model."),
        WeightRenaming(r"^vision_model\.vision_model\.", "model.vision_model."),
        WeightRenaming(r"^mm_projector\.", "model.mm_projector."),
        WeightRenaming(r"^image_newline$", "model.image_newline"),
    ],
    overwrite=True,
)
