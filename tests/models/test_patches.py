"""Patch convolutions as products: the same values, of those convolutions alone that see each patch once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from beheld.models.surgery.operation import Changes
from beheld.models.surgery.patches import PackedPatches, pack_patch_convolutions


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(3, 10, 4, 4), (2, 3, 12, 20)),
        (nn.Conv2d(3, 10, 4, 4, bias=False, padding="valid"), (1, 3, 11, 6)),
        (nn.Conv2d(2, 5, (2, 3), (2, 3)), (3, 2, 4, 9)),
        (nn.Conv3d(3, 6, (2, 4, 4), (2, 4, 4), bias=False), (7, 3, 2, 4, 4)),
        (nn.Conv3d(3, 6, (2, 4, 4), (2, 4, 4)), (1, 3, 5, 8, 12)),
    ],
    ids=["whole", "edges", "oblong", "patches", "clip"],
)
@torch.inference_mode()
def test_values_and_shapes_are_the_convolutions(conv: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model = nn.Sequential(conv)
    expected = model(x)
    assert pack_patch_convolutions(model, torch.float32, Changes()) == 1
    packed = model[0]
    assert isinstance(packed, PackedPatches)
    torch.testing.assert_close(model(x), expected)
    # As towers ask what to convert pixels to.
    assert packed.weight.dtype == torch.float32
    # As towers make a sequence of it.
    torch.testing.assert_close(model(x).flatten(2).transpose(1, 2), expected.flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 6, 4, 2),
        nn.Conv2d(3, 6, 4, 4, padding=1),
        nn.Conv2d(3, 6, 1, 1, padding="same"),
        nn.Conv2d(3, 6, 1, 1),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        nn.Conv2d(3, 6, 2, 2, dilation=2),
        nn.Conv2d(3, 6, 2, 2, dtype=torch.bfloat16),
        nn.ConvTranspose2d(3, 6, 2, 2),
        nn.Conv1d(3, 6, 2, 2),
    ],
)
def test_other_convolutions_stay(conv: Any) -> None:
    model = nn.Sequential(conv)
    assert pack_patch_convolutions(model, torch.float32, Changes()) == 0
    assert model[0] is conv
