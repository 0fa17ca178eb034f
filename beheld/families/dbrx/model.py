"""DBRX names its decoder layers `blocks`, and keeps the weights of all experts in three matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from beheld.families.model import FamilyModel
from beheld.models.surgery.experts import Experts
from beheld.models.surgery.linears import linear_of, replace_children
from beheld.models.surgery.operation import Changes


class DbrxExperts(Experts):
    """Stands for transformers' module of this name, whose matrices are (E I, H)."""

    def __init__(self, shell: Any) -> None:
        mlp, shape = shell.mlp, (shell.num_experts, shell.ffn_hidden_size, shell.hidden_size)
        gates, ups, downs = (weight.data.view(shape) for weight in (mlp.w1, mlp.v1, mlp.w2))
        joined: list[nn.Module] = [linear_of(torch.cat(pair)) for pair in zip(gates, ups, strict=True)]
        back: list[nn.Module] = [linear_of(down.t()) for down in downs]
        super().__init__(joined, back, mlp.activation_fn)
        mlp.w1 = mlp.v1 = mlp.w2 = None
        self.__dict__["shell"] = shell

    def restored(self) -> nn.Module:
        """Return transformers' module with these weights."""
        shell: Any = self.__dict__["shell"]
        ups: Any = self.ups
        downs: Any = self.downs
        gates_and_ups = [layer.weight.data.chunk(2) for layer in ups]
        both = [torch.cat(parts) for parts in zip(*gates_and_ups, strict=True)]
        back = torch.cat([layer.weight.data.t() for layer in downs])
        for name, weight in zip(("w1", "v1", "w2"), (*both, back), strict=True):
            setattr(shell.mlp, name, nn.Parameter(weight.contiguous(), requires_grad=False))
        made: nn.Module = shell
        return made

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply hidden_states (1, T, H), experts (T, K) and their weights (T, K) -> (1, T, H)."""
        rows_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(rows_TH, top_k_index, top_k_weights).view_as(hidden_states)


def adapt(model: Any, changes: Changes) -> None:
    """Give the list of layers its usual name, and replace the experts; see FamilyModel.adapt."""
    from transformers.models.dbrx import modeling_dbrx

    decoder = model.transformer
    # Not as a submodule: the layers' weights would be listed twice.
    vars(decoder)["layers"] = decoder.blocks
    changes.undo_with(lambda: vars(decoder).pop("layers"))

    def made(child: Any) -> DbrxExperts | None:
        return DbrxExperts(child) if isinstance(child, modeling_dbrx.DbrxExperts) else None

    replace_children(model, made, changes)


MODEL = FamilyModel(adapt=adapt)
