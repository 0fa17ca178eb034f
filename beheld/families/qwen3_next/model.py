"""Qwen3-Next: mixers with the gated delta rule, whose projections are joined by key heads.

Shapes: T tokens of a step, H hidden size, J key heads, M value heads, V size of a value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat

from beheld.families._shared.gated_delta.mixer import DeltaMixer, replace_mixers
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class JoinedDeltaMixer(DeltaMixer):
    """A mixer with two projections: of each key head, its query, its key, and values and gates of its value heads."""

    in_proj_qkvz: Any
    in_proj_ba: Any
    projections = ("in_proj_qkvz", "in_proj_ba")

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See DeltaMixer."""
        heads, key_dim = self.recurrence.key_heads, self.recurrence.key_dim
        share = self.recurrence.value_heads // heads
        joined_TJ = self.in_proj_qkvz(x_TH).unflatten(-1, (heads, -1))
        width = share * self.value_dim
        parts = joined_TJ.split([key_dim, key_dim, width, width], dim=-1)
        b_TJ, a_TJ = self.in_proj_ba(x_TH).unflatten(-1, (heads, -1)).split([share, share], dim=-1)
        z_TMV = parts[3].flatten(1).unflatten(-1, (-1, self.value_dim))
        return cat([part.flatten(1) for part in parts[:3]], dim=-1), z_TMV, b_TJ.flatten(1), a_TJ.flatten(1)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers; see FamilyModel.adapt."""
    replace_mixers(model, changes, JoinedDeltaMixer)


MODEL = FamilyModel(adapt=adapt, plain_head=True, unused_weights=("mtp.",))
