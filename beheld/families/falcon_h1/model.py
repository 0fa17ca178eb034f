"""Falcon-H1: mixers of Mamba-2 with multipliers, and embeddings that are multiplied before the layers.

Shapes: T tokens of a step, H hidden size, I inner size, C channels of the convolution, M heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from beheld.families._shared.mamba.mixer import HeadMixer, replace_mixers
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


class ScaledMixer(HeadMixer):
    """A mixer whose inputs and projections are multiplied, and whose norm is left out in some checkpoints."""

    mup_vector: Tensor

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.multiplier: float = mixer.ssm_in_multiplier
        self.normalizes: bool = mixer.mamba_rms_norm
        self.register_buffer("mup_vector", mixer.mup_vector, persistent=False)

    def project(self, x_TH: Tensor) -> Tensor:
        """See HeadMixer."""
        made: Tensor = self.in_proj(x_TH * self.multiplier) * self.mup_vector[0]
        return made

    def gated(self, out_TI: Tensor, gate_TI: Tensor) -> Tensor:
        """See HeadMixer."""
        return super().gated(out_TI, gate_TI) if self.normalizes else out_TI * nn.functional.silu(gate_TI)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers, and multiply embeddings of tokens as the model does; see FamilyModel.adapt."""
    replace_mixers(model, changes, ScaledMixer)
    embedding, factor = model.get_input_embeddings(), model.config.embedding_multiplier
    embed = embedding.forward
    changes.set(embedding, "forward", lambda ids: embed(ids) * factor)


MODEL = FamilyModel(adapt=adapt)
