"""OLMo Hybrid: mixers with the gated delta rule, each of whose inputs has a projection of its own.

Shapes: T tokens of a step, H hidden size, M value heads, V size of a value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat

from beheld.families._shared.gated_delta.mixer import DeltaMixer, replace_mixers
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class ApartDeltaMixer(DeltaMixer):
    """A mixer with six projections; where eigenvalues of its state may be negative, it writes twice as much."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    g_proj: Any
    b_proj: Any
    a_proj: Any
    o_norm: Any
    o_proj: Any
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    parts = ("conv1d", "dt_bias", "A_log", "o_norm", "o_proj")

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.most = 2.0 if mixer.allow_neg_eigval else 1.0

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See DeltaMixer."""
        x_TC = cat([self.q_proj(x_TH), self.k_proj(x_TH), self.v_proj(x_TH)], dim=-1)
        z_TMV = self.g_proj(x_TH).unflatten(-1, (-1, self.value_dim))
        return x_TC, z_TMV, self.b_proj(x_TH), self.a_proj(x_TH)

    def strength(self, b_TM: Tensor) -> Tensor:
        """See DeltaMixer."""
        return self.most * b_TM.sigmoid()

    def project_out(self, out_TMV: Tensor, z_TMV: Tensor) -> Tensor:
        """See DeltaMixer."""
        normed_TMV = self.o_norm(out_TMV.reshape(-1, self.value_dim), z_TMV.reshape(-1, self.value_dim))
        mixed: Tensor = self.o_proj(normed_TMV.view(1, len(out_TMV), -1))
        return mixed


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers; see FamilyModel.adapt."""
    replace_mixers(model, changes, ApartDeltaMixer)


MODEL = FamilyModel(adapt=adapt, plain_head=True)
