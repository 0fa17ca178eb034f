"""A linear layer of a loaded model that can carry LoRA adapters beside its own weights.

Shapes: see step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.context import current
from beheld.lora.step import LayerWeights


class Switch:
    """Whether any token of the pass under way has an adapter. Compiled code is made once for either state."""

    def __init__(self) -> None:
        self.on = False


class LoRALinear(nn.Module):
    """Computes `base`, and adds what the adapters of the step's tokens say; costs nothing while there are none.

    Args:
        base: a linear layer of any kind, or several of one input as one product.
        names, sizes: of the layers that `base` stands for, and their outputs.
        max_loras, max_rank: slots, and the greatest rank.
        dtype, device: of activations.
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
        # On the CPU, where reading it waits for nothing, and no buffer: it must not follow the model's moves.
        self.ranks_SP = torch.zeros(max_loras, len(sizes), dtype=torch.int64, device="cpu")

    @property
    def weight(self) -> Any:
        """The base's, for models that ask for its type."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """The base's."""
        return self.base.bias

    @property
    def weights(self) -> LayerWeights:
        """This layer's share of all slots."""
        return LayerWeights(self.down_SPRI, self.up_OSR, self.ranks_SP, self.sizes)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
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
        """Leave nothing of the slot's adapter."""
        if self.ranks_SP[slot - 1].any():
            self.weights.down_SPRI[slot - 1].zero_()
            self.weights.up_OSR[:, slot - 1].zero_()
            self.ranks_SP[slot - 1] = 0


def _add(y: Tensor, x: Tensor, down_SPRI: Tensor, up_OSR: Tensor, ranks_SP: Tensor, sizes: Sequence[int]) -> None:
    """The adapters' part of one layer, as one operator, so that a compiler sees a call and does not look into it."""
    step = current().lora
    if step is not None:
        y_TO, x_TI = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        step.add(y_TO, x_TI, LayerWeights(down_SPRI, up_OSR, ranks_SP, sizes))


def _add_shape(y: Tensor, x: Tensor, down_SPRI: Tensor, up_OSR: Tensor, ranks_SP: Tensor, sizes: Sequence[int]) -> None:
    """What a compiler needs to know: nothing is returned."""


_library = torch.library.Library("beheld", "FRAGMENT")
_library.define("lora_add_(Tensor(a!) y, Tensor x, Tensor down, Tensor up, Tensor ranks, SymInt[] sizes) -> ()")
_library.impl("lora_add_", _add, "CompositeExplicitAutograd")
torch.library.register_fake("beheld::lora_add_", _add_shape, lib=_library)
