"""dots.ocr: what its configuration refuses, and its tower's own computation of positions and lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import vision_utils

from beheld.core.errors import ModelError
from beheld.families.dots_ocr.config import DotsOCRConfig
from tests.oracle import reference


@pytest.mark.parametrize(
    ("vision", "named"),
    [
        ({"temporal_patch_size": 2}, "vision_config.temporal_patch_size 2"),
        ({"is_causal": True}, "vision_config.is_causal True"),
        ({"hidden_size": 64}, "vision_config.hidden_size 64"),
    ],
)
def test_an_unsupported_setting_is_named(vision: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        DotsOCRConfig(hidden_size=128, vision_config={"hidden_size": 128} | vision)


def test_packed_images_are_computed_apart() -> None:
    tower = reference.model("dots_ocr").vision_tower
    grids = torch.tensor([[1, 4, 6], [1, 2, 8]])
    pixels = torch.randn(24 + 16, 3 * 14 * 14, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        both = tower(pixels, grid_thw=grids).pooler_output
        parts = zip(pixels.split([24, 16]), grids, strict=True)
        alone = [tower(part, grid_thw=grid[None]).pooler_output for part, grid in parts]
        given = tower(pixels, grid_thw=grids, position_ids=vision_utils.get_vision_position_ids(grids, 2)).pooler_output
    torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-5)
    torch.testing.assert_close(given, both)
