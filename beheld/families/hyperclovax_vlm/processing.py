"""The processor of HyperCLOVA X SEED Vision: an overview and tiles of an image, canvases of nine frames of a video.

Shapes: T tiles of all items, I images, C canvases of all videos, F frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families._shared.processing import FrameChoice
from beheld.families.hyperclovax_vlm.config import Grid, HyperclovaxConfig, best_grid, margins

_CANVAS = 3
"""Rows, and columns, of frames on a full canvas."""


class HyperCLOVAXImageOptions(TypedDict, total=False):
    """The options of one call."""

    pad_to_square: bool


class FrameOptions(TypedDict, total=False):
    """The options of one call, all of which choose frames."""

    num_frames: int
    fps: float
    do_sample_frames: bool


class HyperCLOVAXImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images; the settings are preprocessor_config.json's."""

    valid_kwargs: Any = HyperCLOVAXImageOptions
    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any], config: HyperclovaxConfig) -> None:
        self.tile: int = config.vision_config.image_size
        self.resolutions = config.resolutions
        self.pad_to_square: bool = settings.get("pad_to_square", True)
        self.resample = Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC))
        self.scale: float = settings.get("rescale_factor", 1 / 255)
        mean, std = (settings.get(name, (0.5, 0.5, 0.5)) for name in ("image_mean", "image_std"))
        self.mean, self.std = (np.array(values, dtype=np.float32) for values in (mean, std))
        self.ground = tuple(int(value * 255) for value in mean)
        super().__init__()

    def overview(self, image: Any, is_padded: bool) -> Any:
        """Return the whole image as one tile."""
        if not is_padded:
            return image.resize((self.tile, self.tile), self.resample)
        longest = max(image.size)
        width, height = (math.ceil(edge / longest * self.tile) for edge in image.size)
        return self._centred(image.resize((width, height), self.resample), (self.tile, self.tile))

    def tiles(self, image: Any) -> list[Any]:
        """Return the tiles of an image, row by row."""
        rows, columns = best_grid(image.size, self.resolutions, self.tile)
        room = (columns * self.tile, rows * self.tile)
        across, down = (edge / own for edge, own in zip(room, image.size, strict=True))
        if across < down:
            size = (room[0], min(math.ceil(image.height * across), room[1]))
        else:
            size = (min(math.ceil(image.width * down), room[0]), room[1])
        whole = self._centred(image.resize(size, self.resample), room)
        corners = [(column * self.tile, row * self.tile) for row in range(rows) for column in range(columns)]
        return [whole.crop((x, y, x + self.tile, y + self.tile)) for x, y in corners]

    def _centred(self, image: Any, size: Grid) -> Any:
        whole = Image.new("RGB", size, self.ground)
        whole.paste(image, ((size[0] - image.width) // 2, (size[1] - image.height) // 2))
        return whole

    def values(self, tiles: Sequence[Any]) -> Tensor:
        """Return the normalized values (T, 3, side, side) of tiles."""
        pixels = (np.stack([np.asarray(tile) for tile in tiles]) * self.scale).astype(np.float32)
        return torch.from_numpy(((pixels - self.mean) / self.std).transpose(0, 3, 1, 2).copy())

    def of_images(self, images: Sequence[Any], pad_to_square: bool | None = None) -> dict[str, Any]:
        """Return `pixel_values` (T, 3, side, side), of each image the overview first, and `image_sizes` (I, 2)."""
        is_padded = self.pad_to_square if pad_to_square is None else pad_to_square
        images = [image.convert("RGB") for image in images]
        cut = [tile for image in images for tile in (self.overview(image, is_padded), *self.tiles(image))]
        return {"pixel_values": self.values(cut), "image_sizes": torch.tensor([image.size for image in images])}


class CanvasVideoProcessor(FrameChoice, HyperCLOVAXImageProcessor):
    """The same for frames: canvases of up to nine, without an overview."""

    valid_kwargs: Any = FrameOptions
    model_input_names = ("pixel_values_videos",)

    def canvases(self, frames: Any) -> list[Any]:
        """Return frames (F, height, width, 3) on canvases: full ones of 3 x 3, then a row of what is left.

        vLLM 0.27 counts the canvases in this way. No published text at hand says how the last frames lie; a row gives
        each of them a tile.
        """
        squares = [Image.fromarray(np.asarray(frame)).resize((self.tile, self.tile)) for frame in frames]
        made = []
        for start in range(0, len(squares), _CANVAS**2):
            own = squares[start : start + _CANVAS**2]
            columns = _CANVAS if len(own) == _CANVAS**2 else len(own)
            canvas = Image.new("RGB", (columns * self.tile, len(own) // columns * self.tile))
            for index, square in enumerate(own):
                canvas.paste(square, (index % columns * self.tile, index // columns * self.tile))
            made.append(canvas)
        return made

    def of_videos(self, videos: Sequence[Any]) -> dict[str, Any]:
        """Return `pixel_values_videos` (T, 3, side, side), `video_canvas_tiles` (C,) and, of each video,
        `video_num_canvases` and `video_num_frames`."""
        cut = [[self.tiles(canvas) for canvas in self.canvases(frames)] for frames in videos]
        return {
            "pixel_values_videos": self.values([tile for video in cut for canvas in video for tile in canvas]),
            "video_canvas_tiles": torch.tensor([len(canvas) for video in cut for canvas in video]),
            "video_num_canvases": torch.tensor([len(video) for video in cut]),
            "video_num_frames": torch.tensor([len(frames) for frames in videos]),
        }


class HyperclovaxProcessor(ProcessorMixin):
    """Images, videos and text of a prompt."""

    def __init__(self, image_processor: Any, tokenizer: Any, config: HyperclovaxConfig) -> None:
        self.config = config
        self.image_token, self.video_token = tokenizer.convert_ids_to_tokens(
            [config.image_token_id, config.video_token_id]
        )
        super().__init__(image_processor, tokenizer, chat_template=tokenizer.chat_template)
        # transformers' own video processors read files and sample; this one is given frames.
        self.video_processor: Any = None

    def _process_images(self, images: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the outputs of images, and the text of each."""
        made = self.image_processor.of_images(images, pad_to_square=options.get("pad_to_square"))
        queries = self.config.num_queries_vis_abstractor_image
        side, texts = math.isqrt(queries), []
        for width, height in made["image_sizes"].tolist():
            rows, columns = best_grid((width, height), self.image_processor.resolutions, self.image_processor.tile)
            rows, columns = rows * side, columns * side
            top, left = margins((width, height), rows, columns)
            # Each row ends with a newline.
            texts.append(self.image_token * (queries + (rows - 2 * top) * (columns - 2 * left + 1)))
        return made, texts

    def _process_videos(self, videos: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the outputs of videos, each (F, height, width, 3), and the text of each."""
        made = self.video_processor.of_videos(videos)
        slow, fast = (getattr(self.config, f"num_queries_vis_abstractor_video_{kind}") for kind in ("slow", "fast"))
        lengths = [slow + (count - 1) * fast for count in made["video_canvas_tiles"].tolist()]
        texts, start = [], 0
        for count in made["video_num_canvases"].tolist():
            texts.append(self.video_token * sum(lengths[start : start + count]))
            start += count
        return made, texts

    def __call__(
        self,
        text: str | Sequence[str],
        images: Any = None,
        videos: Any = None,
        return_tensors: str = "pt",
        **options: Any,
    ) -> Any:
        """Prepare one prompt with its images, a list within a list, and its videos."""
        media: dict[str, Any] = {}
        (prompt,) = [text] if isinstance(text, str) else text
        for token, items, process in (
            (self.image_token, images[0] if images else (), self._process_images),
            (self.video_token, videos or (), self._process_videos),
        ):
            if len(items):
                made, texts = process(items, **options)
                first, *rest = prompt.split(token)
                prompt = first + "".join(found + part for found, part in zip(texts, rest, strict=True))
                media |= made
        media.pop("video_num_frames", None)
        return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors), **media})


def load(path: Path) -> HyperclovaxProcessor:
    """Make the processor of the checkpoint in `path`.

    Raises:
        ModelError: preprocessor_config.json is missing, or its tiles or grids are not the model's.
    """
    from transformers import AutoTokenizer

    config = HyperclovaxConfig.from_dict(read_json(path / CONFIG))
    settings = read_json(path / "preprocessor_config.json")
    if not settings:
        raise ModelError("preprocessor_config.json is missing.", "Fetch the checkpoint again.")
    tile, crop = config.vision_config.image_size, settings.get("crop_size", {})
    given = {
        "crop_size": crop.get("height") if isinstance(crop, Mapping) else crop,
        "size": settings.get("size", {}).get("shortest_edge", tile),
    }
    for name, edge in given.items():
        if edge is not None and edge != tile:
            raise ModelError(
                f"{name} in preprocessor_config.json is {edge}, but the tower in config.json takes tiles of {tile}.",
                "Fetch both files again, or correct the one that is wrong.",
            )
    queries = tuple(f"num_queries_vis_abstractor_{kind}" for kind in ("image", "video_slow", "video_fast"))
    for name in ("anyres", "unpad", *queries):
        known = getattr(config, name)
        if settings.get(name, known) != known:
            raise ModelError(
                f"{name} is {settings[name]!r} in preprocessor_config.json, but {known!r} in config.json.",
                "Fetch both files again, or correct the one that is wrong.",
            )
    grids = settings.get("possible_resolutions")
    if grids and sorted(map(list, grids)) != sorted(map(list, config.resolutions)):
        raise ModelError(
            "possible_resolutions in preprocessor_config.json are other grids than those of config.json.",
            "Fetch both files again, or correct the one that is wrong.",
        )
    tokenizer = AutoTokenizer.from_pretrained(str(path), config=config)
    made = HyperclovaxProcessor(HyperCLOVAXImageProcessor(settings, config), tokenizer, config)
    made.video_processor = CanvasVideoProcessor(settings, config)
    return made
