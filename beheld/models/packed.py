"""Inputs of towers that pack images, computed on the host.

Such a tower reads the grids of its images back from the device to lay out positions and windows, and each time
synchronizes with all that was launched. transformers accepts these inputs as keywords (`vision_utils`), so they are
computed here from grids that stay on the host.

Shapes: I items, P patches of all of them, W windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from beheld.families.model import PackedTower

Upload = Callable[[Tensor], Tensor]

_GRIDS = ("image_grid_thw", "video_grid_thw")


def keywords(packed: PackedTower | None, visual: Any, options: dict[str, Any], upload: Upload) -> dict[str, Any] | None:
    """Return a tower call's keywords except its pixels, on the device except the grid; None if not known.

    Args:
        packed: the inputs that the family's tower takes.
        visual: the tower.
        options: a call's pixels and grid (I, 3), on the host.
    """
    grids = [name for name in _GRIDS if name in options]
    if packed is None or visual is None or len(grids) != 1:
        return None
    grid_I3 = options[grids[0]]
    # The cache holds numbers, not the tower: it would keep the tower's weights after the engine closes.
    windows = (visual.window_size, visual.patch_size) if packed.windows else None
    learned = None
    if packed.learned is not None:
        table = visual.get_submodule(packed.learned)
        learned = (table.num_grid_per_side, table.interpolation_mode, table.interpolation_align_corners)
    merge = packed.merge
    if merge is None:
        # Towers without positions need no size of merged patches.
        merge = visual.spatial_merge_size if packed.positions else 1
    made = _made(packed.positions, merge, windows, learned, tuple(map(tuple, grid_I3.tolist())))
    moved = {name: upload(value) if isinstance(value, Tensor) else value for name, value in made.items()}
    return {**moved, grids[0]: grid_I3}


@functools.lru_cache(maxsize=64)
def _made(
    positions: bool,
    merge: int,
    windows: tuple[int, int] | None,
    learned: tuple[int, str, bool] | None,
    grids: tuple[tuple[int, ...], ...],
) -> dict[str, Any]:
    """Return the keywords for these grids, on the host; cached, because calls with equal sizes are common."""
    from transformers import vision_utils

    grid_I3 = torch.tensor(grids)
    bounds_W1 = vision_utils.get_vision_cu_seqlens(grid_I3)
    made = {"cu_seqlens": bounds_W1, "max_seqlen": int((bounds_W1[1:] - bounds_W1[:-1]).max())}
    if positions:
        made["position_ids"] = vision_utils.get_vision_position_ids(grid_I3, merge)
    if windows is not None:
        window_index, bounds_W1 = vision_utils.get_vision_window_index(
            grid_I3,
            spatial_merge_size=merge,
            window_size=windows[0],
            patch_size=windows[1],
        )
        longest = int((bounds_W1[1:] - bounds_W1[:-1]).max())
        made |= {"window_index": window_index, "cu_window_seqlens": bounds_W1, "max_window_seqlen": longest}
    if learned is not None:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_I3,
            num_grid_per_side=learned[0],
            mode=learned[1],
            align_corners=learned[2],
            spatial_merge_size=merge,
        )
        made |= {"interp_indices": indices, "interp_weights": weights}
    return made
