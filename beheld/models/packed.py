"""What towers that pack pictures take beside their pixels, made on the host.

Such a tower reads the grids of its pictures back from the device to lay out positions and windows, and each time waits
for all that was launched before. transformers takes what it would make of them as keywords (`vision_utils`): so it is
made here from grids that never leave the host.

Shapes: I items, P patches of all of them, W windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Upload = Callable[[Tensor], Tensor]

_GRIDS = ("image_grid_thw", "video_grid_thw")


def keywords(
    kinds: tuple[str, ...] | None, visual: Any, options: dict[str, Any], upload: Upload
) -> dict[str, Any] | None:
    """The keywords of a tower call beside its pixels, tensors on the device but for the grid; None if not known.

    Args:
        kinds: what it takes, see FamilyModel.packed.
        visual: the tower.
        options: a call's pixels and grid (I, 3), on the host.
    """
    grids = [name for name in _GRIDS if name in options]
    if kinds is None or visual is None or len(grids) != 1:
        return None
    grid_I3 = options[grids[0]]
    # Numbers alone are remembered, never the tower: a cache would keep its weights after the engine is closed.
    windows = (visual.window_size, visual.patch_size) if "windows" in kinds else None
    learned = None
    if "learned" in kinds:
        learned = (visual.num_grid_per_side, visual.interpolation_mode, visual.interpolation_align_corners)
    # Towers that are told of no positions need no size of merged patches.
    merge = visual.spatial_merge_size if "positions" in kinds else 1
    made = _made(kinds, merge, windows, learned, tuple(map(tuple, grid_I3.tolist())))
    moved = {name: upload(value) if isinstance(value, Tensor) else value for name, value in made.items()}
    return {**moved, grids[0]: grid_I3}


@functools.lru_cache(maxsize=64)
def _made(
    kinds: tuple[str, ...],
    merge: int,
    windows: tuple[int, int] | None,
    learned: tuple[int, str, bool] | None,
    grids: tuple[tuple[int, ...], ...],
) -> dict[str, Any]:
    """The keywords for these grids, on the host; calls with the same sizes are common."""
    from transformers import vision_utils

    grid_I3 = torch.tensor(grids)
    bounds_W1 = vision_utils.get_vision_cu_seqlens(grid_I3)
    made = {"cu_seqlens": bounds_W1, "max_seqlen": int((bounds_W1[1:] - bounds_W1[:-1]).max())}
    if "positions" in kinds:
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
