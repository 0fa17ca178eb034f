"""MiniCPM-V's processor: an overview of an image, and slices of a grid that is chosen by the image's shape.

Shapes: P patches of all slices, S slices of all images, I images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.errors import ModelError
from beheld.families._shared.processing import FrameChoice
from beheld.families.inputs import EffectiveSize
from beheld.families.minicpmv.config import VERSIONS

Size = tuple[float, float]
Grid = tuple[int, int]


class SliceOptions(TypedDict, total=False):
    """The options of one call."""

    max_slice_nums: int
    use_image_id: bool


def best_grid(size: Grid, side: int, most: int) -> Grid | None:
    """Return the grid (columns, rows) whose shape is nearest to the image's; None if the image is not cut.

    Args:
        size: width and height of the image in pixels.
        side: the edge of a square with as many pixels as a slice should have.
        most: the largest number of slices.
    """
    wanted = min(math.ceil(size[0] * size[1] / side**2), most)
    if wanted <= 1:
        return None
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(columns, n // columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
    shape = math.log(size[0] / size[1])
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])))


def fitted(size: Size, side: int, patch: int, enlarged: bool) -> Grid:
    """Return a size in whole patches: of the same shape, and about `side` squared pixels if it is larger.

    Args:
        size: width and height in pixels.
        side, patch: edges in pixels.
        enlarged: whether smaller images are enlarged, too.
    """
    width, height = size
    if width * height > side**2 or enlarged:
        shape = width / height
        height = int(side / math.sqrt(shape))
        width = int(height * shape)
    return _whole(width, patch), _whole(height, patch)


def _whole(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


class SliceFrameOptions(SliceOptions, total=False):
    """The options of one call, three of which choose frames."""

    num_frames: int
    fps: float
    do_sample_frames: bool


class SliceImageProcessor(ImageProcessingMixin):
    """Makes the tower's input of images; the settings are preprocessor_config.json's.

    Raises:
        ModelError: `slice_mode` is false.
    """

    valid_kwargs: Any = SliceOptions
    model_input_names = ("pixel_values",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.max_slice_nums: int = settings.get("max_slice_nums", 9)
        self.scale_resolution: int = settings.get("scale_resolution", 448)
        self.patch_size: int = settings.get("patch_size", 14)
        self.use_image_id: bool = settings.get("use_image_id", False)
        if not settings.get("slice_mode", True):
            raise ModelError(
                "preprocessor_config.json sets slice_mode to false, which is not supported.",
                "Set it to true; max_slice_nums 1 keeps images whole.",
            )
        self.image_feature_size: int = settings.get("image_feature_size", 64)
        self.mean = np.array(settings.get("norm_mean", (0.5, 0.5, 0.5)), dtype=np.float32)
        self.std = np.array(settings.get("norm_std", (0.5, 0.5, 0.5)), dtype=np.float32)
        super().__init__()

    def grid(self, size: Grid, options: Mapping[str, Any]) -> Grid | None:
        """Return the grid of an image of `size`; None if it is not cut.

        Raises:
            ValueError: max_slice_nums is below 1.
        """
        most = options.get("max_slice_nums")
        most = self.max_slice_nums if most is None else most
        if most < 1:
            raise ValueError(f"max_slice_nums {most} must be 1 or more")
        return best_grid(size, self.scale_resolution, most)

    def refined(self, size: Grid, grid: Grid) -> Grid:
        """Return the size in pixels of an image of `size` that `grid` cuts into slices of whole patches."""
        cell = (_whole(size[0], grid[0]) / grid[0], _whole(size[1], grid[1]) / grid[1])
        width, height = fitted(cell, self.scale_resolution, self.patch_size, enlarged=True)
        return width * grid[0], height * grid[1]

    def slices(self, image: Any, options: Mapping[str, Any]) -> list[Any]:
        """Return the overview of an image, then its slices row by row."""
        image = image.convert("RGB")
        grid = self.grid(image.size, options)
        size = fitted(image.size, self.scale_resolution, self.patch_size, enlarged=grid is None)
        overview = image.resize(size, Image.Resampling.BICUBIC)
        if grid is None:
            return [overview]
        whole = image.resize(self.refined(image.size, grid), Image.Resampling.BICUBIC)
        width, height = whole.width // grid[0], whole.height // grid[1]
        corners = [(column * width, row * height) for row in range(grid[1]) for column in range(grid[0])]
        return [overview, *(whole.crop((x, y, x + width, y + height)) for x, y in corners)]

    def seen(self, size: Grid, options: Mapping[str, Any]) -> EffectiveSize:
        """Return the effective size of an image of `size`."""
        grid = self.grid(size, options)
        if grid is None:
            width, height = fitted(size, self.scale_resolution, self.patch_size, enlarged=True)
            return EffectiveSize(width, height, step=self.patch_size)
        width, height = self.refined(size, grid)
        return EffectiveSize(width, height, 1 + grid[0] * grid[1], step=self.patch_size)

    def __call__(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """Return `pixel_values` (P, 3, side, side), `tgt_sizes` (S, 2) in patches and `num_slices` (I,)."""
        cut = [self.slices(image, options) for image in images]
        slices = [piece for own in cut for piece in own]
        sizes = [(piece.height // self.patch_size, piece.width // self.patch_size) for piece in slices]
        return {
            "pixel_values": torch.cat([self._patches(piece) for piece in slices]),
            "tgt_sizes": torch.tensor(sizes),
            "num_slices": torch.tensor([len(own) for own in cut]),
        }

    def _patches(self, image: Any) -> Tensor:
        values = (np.array(image).astype(np.float32) / 255 - self.mean) / self.std
        side = self.patch_size
        grid = torch.from_numpy(values).unflatten(1, (-1, side)).unflatten(0, (-1, side))
        return grid.permute(0, 2, 4, 1, 3).flatten(0, 1)


class SliceVideoProcessor(FrameChoice, SliceImageProcessor):
    """The same for frames, which are not cut unless a call sets `max_slice_nums`."""

    valid_kwargs: Any = SliceFrameOptions
    model_input_names = ("pixel_values_videos",)


class MiniCPMVProcessor(ProcessorMixin):
    """Images, videos and text of a prompt; `marks` says what stands for an item in a text, by modality."""

    def __init__(self, image_processor: Any, tokenizer: Any, marks: Mapping[str, str]) -> None:
        # What stands for a whole item in a text; `<unk>` stands for one embedding.
        self.image_token, self.video_token = marks["image"], marks["video"]
        super().__init__(image_processor, tokenizer)
        # transformers' own video processors read files and sample; this one is given frames.
        self.video_processor: Any = None
        self.marks = dict(marks)
        self.facts = VERSIONS["2.6"]

    def words(self, grid: Grid | None, number: int | None) -> str:
        """Return the text that an image of a grid of slices stands for; `number` is the one it is given."""
        unknown = "<unk>" * self.image_processor.image_feature_size
        known = "" if number is None else f"<image_id>{number}</image_id>"
        columns, rows = grid or (0, 0)
        if not self.facts.marked_together:
            return f"{known}<image>{unknown}</image>" + "\n".join([f"<slice>{unknown}</slice>" * columns] * rows)
        cut = "\n".join([f"<image>{unknown}</image>" * columns] * rows)
        return f"{known}<image>{unknown}</image>" + (f"<slice>{cut}</slice>" if grid else "")

    def image(self, image: Any, number: int, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the outputs and the text of image `number` of a prompt."""
        part = self.image_processor
        own = {name: value for name, value in options.items() if name in SliceOptions.__annotations__}
        numbered = part.use_image_id if own.get("use_image_id") is None else own["use_image_id"]
        return part([image], **own), self.words(part.grid(image.size, own), number if numbered else None)

    def video(self, frames: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the outputs and the text of a video, frames (count, height, width, 3)."""
        own = {"max_slice_nums": options.get("max_slice_nums") or 1}
        images = [Image.fromarray(np.asarray(frame)) for frame in frames]
        made = self.video_processor(images, **own)
        made["num_slices"] = made["num_slices"].sum(dim=0, keepdim=True)
        return made, "".join(self.words(self.video_processor.grid(frame.size, own), None) for frame in images)

    def __call__(
        self, text: Sequence[str], images: Any = None, videos: Any = None, return_tensors: str = "pt", **options: Any
    ) -> Any:
        """Prepare one prompt with its images, a list within a list, and its videos, in the prompt's order."""
        (prompt,) = text
        waiting = {
            "image": [self.image(image, number, options) for number, image in enumerate(images[0] if images else ())],
            "video": [self.video(video, options) for video in videos or ()],
        }
        found: list[dict[str, Any]] = []
        while True:
            marks = {name: prompt.find(self.marks[name]) for name in waiting if self.marks[name] in prompt}
            if not marks:
                break
            modality = min(marks, key=lambda name: marks[name])
            outputs, words = waiting[modality].pop(0)
            found.append(outputs)
            prompt = prompt.replace(self.marks[modality], words + self.facts.after, 1)
        media = {name: torch.cat([entry[name] for entry in found]) for name in (found[0] if found else ())}
        return BatchFeature({**self.tokenizer([prompt], return_tensors=return_tensors), **media})


P = TypeVar("P", bound=MiniCPMVProcessor)


def load(path: Path, marks: Mapping[str, str], kind: type[P]) -> P:
    """Make the processor of the class `kind` for the checkpoint in `path`; `marks` as MiniCPMVProcessor's.

    Raises:
        ModelError: preprocessor_config.json is missing.
    """
    from transformers import AutoTokenizer

    from beheld.checkpoint.convert import own_config

    raw, settings = read_json(path / CONFIG), read_json(path / "preprocessor_config.json")
    if not settings:
        raise ModelError("MiniCPM-V's preprocessor_config.json is missing.", "Fetch the checkpoint again.")
    known = own_config(raw)
    tokenizer = AutoTokenizer.from_pretrained(str(path), **known)
    made = kind(SliceImageProcessor(settings), tokenizer, marks)
    made.facts = known["config"].facts
    if made.facts.videos:
        made.video_processor = SliceVideoProcessor(settings)
    return made
