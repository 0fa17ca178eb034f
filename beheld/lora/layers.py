"""A linear layer that adds LoRA adapters to its output.

Shapes: see step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.context import current
from beheld.lora.step import LayerWeights
from beheld.platform import operators


class Switch:
    """Whether any token of the current pass has an adapter; compiled code exists once per state."""

    def __init__(self) -> None:
        self.on = False


class LoRALinear(nn.Module):
    """Computes `base` and adds the adapters of the step's tokens; costs nothing while no token has one.

    Args:
        base: a linear layer of any kind, or several layers with one input joined into one product.
        names, sizes: the names and outputs of the layers that `base` joins.
        max_loras, max_rank: the number of slots, and the largest rank.
        dtype, device: of the activations.
        switch: shared by all layers.
    """

    def __init__(
        self,
        base: nn.Module,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        switch: Switch,
    ) -> None:
        super().__init__()
        assert len(names) == len(sizes)
        self.base = base
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.names = tuple(names)
        self.sizes = list(sizes)
        self.switch = switch
        down = torch.zeros(max_loras, len(sizes), max_rank, self.in_features, dtype=dtype, device=device)
        up = torch.zeros(sum(sizes), max_loras, max_rank, dtype=dtype, device=device)
        self.register_buffer("down_SPRI", down, persistent=False)
        self.register_buffer("up_OSR", up, persistent=False)
        # On the CPU, where reading it does not synchronize; not a buffer, because it must not move with the model.
        self.ranks_SP = torch.zeros(max_loras, len(sizes), dtype=torch.int64, device="cpu")

    @property
    def weight(self) -> Any:
        """Return the base's weight, for models that ask for its type."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """Return the base's bias."""
        return self.base.bias

    @property
    def weights(self) -> LayerWeights:
        """Return this layer's part of all slots."""
        return LayerWeights(self.down_SPRI, self.up_OSR, self.ranks_SP, self.sizes)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I) -> (..., O)."""
        y: Tensor = self.base(x)
        if self.switch.on:
            if torch.compiler.is_compiling():
                torch.ops.beheld.lora_add_(y, x, self.down_SPRI, self.up_OSR, self.ranks_SP, self.sizes)
            else:
                _add(y, x, self.down_SPRI, self.up_OSR, self.ranks_SP, self.sizes)  # type: ignore[arg-type]
        return y

    def fill(self, slot: int, part: int, down_rI: Tensor, up_Or: Tensor) -> None:
        """Write one part's matrices into an empty slot."""
        rank, low = down_rI.shape[0], sum(self.sizes[:part])
        self.weights.down_SPRI[slot - 1, part, :rank].copy_(down_rI, non_blocking=True)
        self.weights.up_OSR[low : low + self.sizes[part], slot - 1, :rank].copy_(up_Or, non_blocking=True)
        self.ranks_SP[slot - 1, part] = rank

    def empty(self, slot: int) -> None:
        """Clear the slot in this layer."""
        if self.ranks_SP[slot - 1].any():
            self.weights.down_SPRI[slot - 1].zero_()
            self.weights.up_OSR[:, slot - 1].zero_()
            self.ranks_SP[slot - 1] = 0


def _add(y: Tensor, x: Tensor, down_SPRI: Tensor, up_OSR: Tensor, ranks_SP: Tensor, sizes: Sequence[int]) -> None:
    """Add the adapters' outputs in one layer; a registered operator, so that torch.compile sees an opaque call."""
    step = current().lora
    if step is not None:
        y_TO, x_TI = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        step.add(y_TO, x_TI, LayerWeights(down_SPRI, up_OSR, ranks_SP, sizes))


def _add_shape(y: Tensor, x: Tensor, down_SPRI: Tensor, up_OSR: Tensor, ranks_SP: Tensor, sizes: Sequence[int]) -> None:
    """Describe the result for torch.compile: none."""


operators.register(
    "lora_add_(Tensor(a!) y, Tensor x, Tensor down, Tensor up, Tensor ranks, SymInt[] sizes) -> ()", _add, _add_shape
)
