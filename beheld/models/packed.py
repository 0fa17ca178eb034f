"""What towers that pack images take beside their pixels, made on the host.

Such a tower reads the grids of its images back from the device to lay out positions and windows, and each time waits
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

from beheld.families.model import PackedTower

Upload = Callable[[Tensor], Tensor]

_GRIDS = ("image_grid_thw", "video_grid_thw")


def keywords(packed: PackedTower | None, visual: Any, options: dict[str, Any], upload: Upload) -> dict[str, Any] | None:
    """The keywords of a tower call besides its pixels, tensors on the device but for the grid; None if not known.

    Args:
        packed: what the family's tower takes.
        visual: the tower.
        options: a call's pixels and grid (I, 3), on the host.
    """
    grids = [name for name in _GRIDS if name in options]
    if packed is None or visual is None or len(grids) != 1:
        return None
    grid_I3 = options[grids[0]]
    # Numbers alone are remembered, never the tower: a cache would keep its weights after the engine is closed.
    windows = (visual.window_size, visual.patch_size) if packed.windows else None
    learned = None
    if packed.learned is not None:
        table = visual.get_submodule(packed.learned)
        learned = (table.num_grid_per_side, table.interpolation_mode, table.interpolation_align_corners)
    merge = packed.merge
    if merge is None:
        # Towers that take no positions need no size of merged patches.
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
    """The keywords for these grids, on the host; calls with the same sizes are common."""
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
