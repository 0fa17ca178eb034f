"""GLM-4V: its tower looks up learned positions by image sizes, which stay on the host.

Shapes: P patches of all images, W images and frames, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.families.model import FamilyModel, PackedTower
from beheld.models.surgery.operation import Changes


@dataclass(frozen=True)
class _Sized:
    """Calls the tower's look-up with sizes computed on the device, so that nothing is copied there."""

    look_up: Callable[..., Tensor]

    def __call__(self, embeds_PH: Tensor, lengths_W: Tensor, grid: Any, rows_P: Tensor, columns_P: Tensor) -> Tensor:
        """Add positions to patches: (P, H).

        Args:
            lengths_W: patches of each image or frame.
            grid: the sizes on the host; unused.
            rows_P, columns_P: each patch's row and column in its image.
        """
        patch_P = torch.arange(len(embeds_PH), device=lengths_W.device)
        owner_P = (patch_P >= lengths_W.cumsum(0).unsqueeze(1)).sum(0)
        last_2W = lengths_W.new_zeros((2, len(lengths_W)), dtype=rows_P.dtype)
        last_2W.scatter_reduce_(1, owner_P.expand(2, -1), torch.stack((rows_P, columns_P)), "amax")
        sizes_W3 = torch.stack((torch.ones_like(last_2W[0]), *(last_2W + 1)), dim=1)
        return self.look_up(embeds_PH, lengths_W, sizes_W3, rows_P, columns_P)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the look-up of positions; see FamilyModel.adapt."""
    embeddings = getattr(model.model.visual, "embeddings", None)
    if embeddings is not None:
        changes.set(embeddings, "forward", _Sized(embeddings.forward))


MODEL = FamilyModel(adapt=adapt, packed=PackedTower(), packs_attention=True, positions_by_kind=True)
