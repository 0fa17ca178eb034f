"""Experts as lists of linear layers of one method, for devices that compute one expert after the other.

Shapes: T tokens, S rows of experts (a token and one of its experts), C choices per token, G experts, K inputs, N
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from beheld.quant.linear import StoredExperts, StoredLinear, linear_of

EXPERTS = ("gate_up_proj", "down_proj")


class ListedExperts(StoredExperts):
    """Experts in place of transformers' experts: two products for each chosen expert, gate and up as one.

    The experts' own method computes what happens between the two products.

    Args:
        shell: the module that this one replaces; its weights are gone.
        gate_up, down: each expert's layers.
    """

    def __init__(self, shell: nn.Module, gate_up: Sequence[StoredLinear], down: Sequence[StoredLinear]) -> None:
        super().__init__()
        self.shell = shell
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self.num_experts = len(gate_up)

    @classmethod
    def made(cls, experts: Any, make: Callable[[nn.Linear], StoredLinear]) -> Self:
        """Quantize the weights of transformers' experts, one expert at a time; `experts` loses them."""
        found: list[list[StoredLinear]] = []
        for name in EXPERTS:
            weight_GNK = getattr(experts, name).data
            weight_GNK = weight_GNK.transpose(1, 2) if experts.is_transposed else weight_GNK
            found.append([make(linear_of(weight_NK)) for weight_NK in weight_GNK])
            setattr(experts, name, None)
        return cls(experts, *found)

    def part(self, experts: slice) -> Self:
        """Return a module of these experts alone, sharing memory."""
        return type(self)(self.shell, list(self.gate_up)[experts], list(self.down)[experts])  # type: ignore[arg-type]

    def restored(self) -> nn.Module:
        """Return transformers' module with the dequantized weights."""
        for name, layers in zip(EXPERTS, (self.gate_up, self.down), strict=True):
            weight_GNK = torch.stack([layer.restored().weight for layer in layers])  # type: ignore[operator]
            weight_GNK = weight_GNK.transpose(1, 2).contiguous() if self.shell.is_transposed else weight_GNK
            setattr(self.shell, name, nn.Parameter(weight_GNK, requires_grad=False))
        return self.shell

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K); choice G means none."""
        choices_S = top_k_index.reshape(-1)
        counts = torch.bincount(choices_S, minlength=self.num_experts).tolist()[: self.num_experts]
        # Rows in the order of their experts; rows without one come last, and are zero.
        order_S = choices_S.argsort(stable=True)
        x_SK = hidden_states.index_select(0, order_S[: sum(counts)] // top_k_index.shape[1])
        inner = self.shell._apply_gate(_by_expert(self.gate_up, x_SK, counts))  # type: ignore[operator]
        y_SK = hidden_states.new_zeros((len(choices_S), hidden_states.shape[1]))
        y_SK.index_copy_(0, order_S[: sum(counts)], _by_expert(self.down, inner, counts))
        # A token's terms are added in the order of its choices, whatever other tokens chose.
        y_TCK = y_SK.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return y_TCK.sum(1).to(hidden_states.dtype)


def _by_expert(layers: nn.ModuleList, x_SK: Tensor, counts: Sequence[int]) -> Tensor:
    """Apply each expert's layer to its rows, `counts` of them in order."""
    chosen = [(layer, count) for layer, count in zip(layers, counts, strict=True) if count]
    if not chosen:
        return x_SK.new_empty((0, layers[0].out_features))  # type: ignore[arg-type]
    parts = x_SK.split([count for _, count in chosen])
    return torch.cat([layer(part) for (layer, _), part in zip(chosen, parts, strict=True)])
