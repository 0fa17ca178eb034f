"""The items with which an engine tests itself at its start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from beheld.core.media import MediaItem
from beheld.inputs.media.samples import first_rows

NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def enlarged(modality: str, times: int, height: int, width: int, merge: int) -> MediaItem:
    patches = torch.arange(times * height * width, dtype=torch.float32)[:, None].expand(-1, 6)
    features = dict(zip(NAMES[modality], (patches, torch.tensor([times, height, width])), strict=True))
    num_embeds = times * height * width // merge**2
    return MediaItem(modality, b"d" * 32, features, {}, (7,) * num_embeds, None, num_embeds)


@pytest.mark.parametrize("modality", NAMES)
@pytest.mark.parametrize(
    ("height", "width", "merge", "rows"), [(28, 28, 2, 4), (28, 28, 1, 3), (64, 64, 4, 4), (30, 6, 3, 12)]
)
def test_as_few_rows_as_a_tower_takes_are_left_of_an_enlarged_item(
    modality: str, height: int, width: int, merge: int, rows: int
) -> None:
    item = enlarged(modality, 1, height, width, merge)
    cut = first_rows(item)
    patches, grid = (cut.features[name] for name in NAMES[modality])
    assert grid.tolist() == [1, rows, width]
    assert patches[:, 0].tolist() == list(range(rows * width))
    assert cut.num_kept * merge**2 == rows * width
    # The item itself is a request's as well.
    assert item.features[NAMES[modality][1]].tolist() == [1, height, width]


def test_other_items_stay_as_they_are() -> None:
    whole = enlarged("image", 1, 28, 28, 2)
    others = [
        enlarged("image", 1, 8, 8, 2),
        enlarged("video", 2, 28, 28, 2),
        replace(whole, features={**whole.features, "pixel_attention_mask": torch.ones(784)}),
        # One embedding ends each row of this one.
        replace(whole, num_embeds=14 * 15),
        replace(whole, features={"pixel_values": torch.zeros(3, 448, 448)}),
        replace(whole, modality="audio"),
    ]
    assert all(first_rows(item) is item for item in others)
