"""MiniCPM-V: versions, grids of slices, the text of an image."""

from __future__ import annotations

import pytest

from beheld.core.errors import ModelError
from beheld.families.minicpmv.config import MiniCPMVConfig
from beheld.families.minicpmv.processing import best_grid, fitted


@pytest.mark.parametrize("version", [2.0, 2.5, 4.0, 4.5, 7, None])
def test_another_version_is_refused_by_name(version: float | None) -> None:
    with pytest.raises(ModelError, match=f"version {version} "):
        MiniCPMVConfig(version=version, vision_config={"hidden_size": 32})


def test_version_2_6_is_read() -> None:
    assert MiniCPMVConfig(version=2.6, vision_config={"hidden_size": 32}).vision_config.hidden_size == 32


@pytest.mark.parametrize(
    ("size", "grid"), [((448, 448), None), ((900, 450), (2, 1)), ((450, 1800), (1, 4)), ((1344, 1344), (3, 3))]
)
def test_grids_follow_the_shape(size: tuple[int, int], grid: tuple[int, int] | None) -> None:
    assert best_grid(size, 448, 9) == grid


def test_small_images_are_enlarged_only_if_asked() -> None:
    assert fitted((100, 50), 448, 14, enlarged=False) == (98, 56)
    assert fitted((100, 50), 448, 14, enlarged=True) == (630, 322)
