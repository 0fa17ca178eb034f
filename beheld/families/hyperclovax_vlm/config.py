"""The configuration of HyperCLOVA X SEED Vision, and the grids of tiles that follow from it."""

from __future__ import annotations

import math
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, SiglipVisionConfig
from transformers.image_processing_utils import select_best_resolution

from beheld.core.errors import ModelError

Grid = tuple[int, int]
_LAYOUT = "Use a checkpoint of the layout of naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B."


class HyperclovaxConfig(PretrainedConfig):
    """config.json as published.

    Attributes:
        text_config, vision_config: Llama and SigLIP.
        image_token_id, video_token_id: the placeholders.
        mm_projector_type: what stands between tower and text.
        use_nth_layer: the tower's layer whose states are used, as an index into all hidden states.
        anyres: whether an image is cut into tiles after an overview of the whole.
        unpad: whether the embeddings of padding are dropped, and each row ends with a newline.
        max_num_grids, use_1x1_grid, possible_resolutions: the grids; sizes are (height, width) in pixels.
        num_queries_vis_abstractor_image: embeddings of one tile of an image.
        num_queries_vis_abstractor_video_slow, num_queries_vis_abstractor_video_fast: of a canvas' first tile, and of
            each other one.
        first_last_frames_slow: whether only the first and last tiles of a whole video are slow.
        proj_pos_emb, proj_prenorm: whether the abstractor adds positions to its input, and normalizes it before.
    """

    model_type = "hyperclovax_vlm"
    sub_configs = {"text_config": LlamaConfig, "vision_config": SiglipVisionConfig}  # noqa: RUF012
    text_config: Any = None
    vision_config: Any = None
    image_token_id: int = 100271
    video_token_id: int = 100270
    mm_projector_type: str = "cabstractor"
    use_nth_layer: int = -2
    anyres: bool = False
    unpad: bool = False
    max_num_grids: int = -1
    use_1x1_grid: bool = False
    possible_resolutions: Any = None
    num_queries_vis_abstractor_image: int = 81
    num_queries_vis_abstractor_video_slow: int = 81
    num_queries_vis_abstractor_video_fast: int = 9
    first_last_frames_slow: bool = False
    proj_pos_emb: bool = True
    proj_prenorm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the variant and make the configurations of the parts.

        Raises:
            ModelError: the checkpoint is of another variant.
        """
        # transformers makes a configuration without arguments to learn its defaults.
        if self.text_config is not None:
            self._check()
        if not isinstance(self.text_config, LlamaConfig):
            self.text_config = LlamaConfig(**_without_type(self.text_config))
        if not isinstance(self.vision_config, SiglipVisionConfig):
            self.vision_config = SiglipVisionConfig(**_without_type(self.vision_config))
        # The published file says this of the text alone.
        self.tie_word_embeddings = bool(self.text_config.tie_word_embeddings)
        super().__post_init__(**kwargs)

    def _check(self) -> None:
        parts = {"text_config": "llama", "vision_config": "siglip_vision_model"}
        for name, wanted in parts.items():
            part = getattr(self, name)
            found = part.get("model_type") if isinstance(part, dict) else getattr(part, "model_type", None)
            if found != wanted:
                raise ModelError(f"{name} in config.json is of the type {found!r}; only {wanted!r} is known.", _LAYOUT)
        known = {"mm_projector_type": "cabstractor", "anyres": True, "unpad": True, "first_last_frames_slow": False}
        for name, value in known.items():
            if getattr(self, name) != value:
                raise ModelError(
                    f"{name} in config.json is {getattr(self, name)!r}; only {value!r} is supported.", _LAYOUT
                )
        for name in ("image", "video_slow", "video_fast"):
            queries = getattr(self, f"num_queries_vis_abstractor_{name}")
            if queries < 1 or math.isqrt(queries) ** 2 != queries:
                raise ModelError(
                    f"num_queries_vis_abstractor_{name} in config.json is {queries}; it must be a square number.",
                    _LAYOUT,
                )

    @property
    def resolutions(self) -> list[Any]:
        """The sizes (height, width) in pixels to which images are fitted."""
        tile = self.vision_config.image_size
        return self.possible_resolutions or [
            [rows * tile, columns * tile] for rows, columns in _grids(self.max_num_grids, self.use_1x1_grid)
        ]


def _without_type(part: Any) -> dict[str, Any]:
    return {name: value for name, value in (part or {}).items() if name != "model_type"}


def _grids(most: int, single: bool) -> list[Grid]:
    counts = range(1, most + 1)
    return [(r, c) for r in counts for c in counts if r * c <= most and (single or r * c > 1)]


def best_grid(size: Grid, resolutions: list[Any], tile: int) -> Grid:
    """Return rows and columns of tiles for an image of `size` (width, height) in pixels."""
    height, width = select_best_resolution(size[::-1], resolutions)
    return height // tile, width // tile


def margins(size: Grid, rows: int, columns: int) -> Grid:
    """Return the rows of padding at the top, as many as at the bottom, and the columns at the left, as at the right.

    Args:
        size: width and height of the image in pixels.
        rows, columns: of embeddings, padding included.
    """
    width, height = size
    if width / height > columns / rows:
        return (rows - int(height * (columns / width))) // 2, 0
    return 0, (columns - int(width * (rows / height))) // 2
