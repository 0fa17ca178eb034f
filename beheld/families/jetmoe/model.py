"""JetMoE's experts as layers of their own, whose weights can be packed, and which are skipped if nothing chose them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.families.model import FamilyModel
from beheld.models.surgery.linears import linear_of, replace_children
from beheld.models.surgery.operation import Changes


class ParallelExperts(nn.Module):
    """Stands for transformers' module of this name: rows S in the order of experts, I inputs to O outputs."""

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear_of(weight) for weight in shell.weight.data)
        self._outputs = shell.output_size
        shell.weight = None
        self.__dict__["shell"] = shell

    def restored(self) -> nn.Module:
        """Return transformers' module with these weights."""
        shell: Any = self.__dict__["shell"]
        layers: Any = self.layers
        shell.weight = nn.Parameter(torch.stack([layer.weight.data for layer in layers]), requires_grad=False)
        made: nn.Module = shell
        return made

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Apply (S, I), of which each expert has so many rows -> (S, O)."""
        made = [
            layer(rows) for layer, rows in zip(self.layers, inputs.split(expert_size), strict=True) if rows.shape[0]
        ]
        return torch.cat(made) if made else inputs.new_empty(0, self._outputs)


def adapt(model: Any, changes: Changes) -> None:
    """Replace the experts; see FamilyModel.adapt."""
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    def made(child: Any) -> ParallelExperts | None:
        return ParallelExperts(child) if isinstance(child, JetMoeParallelExperts) else None

    replace_children(model, made, changes)


MODEL = FamilyModel(adapt=adapt)
