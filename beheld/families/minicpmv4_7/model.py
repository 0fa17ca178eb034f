"""MiniCPM-V 4.7: MiniCPM-V 4.6's mixers and tower; the model itself places slices on a canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from beheld.families._shared.gated_delta.mixer import replace_mixers
from beheld.families.minicpmv4_6.model import MODEL as EARLIER
from beheld.models.surgery.operation import Changes


def _pairs(rows: Tensor | Sequence[Sequence[int]] | None) -> Tensor | None:
    """Return heights and widths of all slices (slices, 2), of a row for each item."""
    if rows is None:
        return None
    return torch.tensor([int(number) for row in rows for number in row]).reshape(-1, 2)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers, and let positions be asked for by items; see FamilyModel.adapt."""
    replace_mixers(model, changes)
    place = model.model.get_rope_index

    def placed(
        input_ids: Tensor, mm_token_type_ids: Tensor, image_canvas: Any = None, video_canvas: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return positions (3, 1, L) and what is added to later ones (1, 1)."""
        made: tuple[Tensor, Tensor] = place(
            input_ids,
            mm_token_type_ids=mm_token_type_ids,
            target_sizes=_pairs(image_canvas),
            target_sizes_videos=_pairs(video_canvas),
        )
        return made

    changes.set(model.model, "get_rope_index", placed)


MODEL = replace(EARLIER, adapt=adapt, plain_axes=False)
