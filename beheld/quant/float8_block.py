"""Products of FP8 weights with a scale for each block, times activations rounded to FP8 by row and group of inputs.

A product: x = q_x s_x and W = q_W s_W with q in FP8 (float8_e4m3fn), one s_x per row and group of inputs, one s_W per
block of outputs and group. The sum over a group's products of FP8 numbers is multiplied by both scales, and the groups
are added in float32.

Devices without FP8 kernels multiply the same numbers in float32; tests compare with that.

Shapes: T rows of x, S slots (see slots.py), E experts, K inputs, N outputs, G groups of C inputs, B blocks of
outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant import slots as _slots  # noqa: F401 (defines operators)
from beheld.quant.float8 import FP8, in_steps, scale_of
from beheld.quant.linear import StoredExperts, StoredLinear, bias_of, joined_bias

# Sizes of groups that kernels take, and what the outputs are multiples of.
GROUPS = (32, 64, 128)
ALIGNED = 16
# With more rows torch's own product is faster, where there is one for these blocks.
MANY_ROWS = 64
_LIBRARY_BLOCK = (128, 128)


@dataclass(frozen=True)
class BlockNumbers:
    """FP8 numbers with a scale for each block of outputs and inputs.

    Attributes:
        rows: FP8, (..., N, K).
        scale: float32, (..., B, G), the blocks of one matrix after those of another; each has the same number of
            outputs, which divides N, or one.
    """

    rows: Tensor
    scale: Tensor

    @classmethod
    def of_rows(cls, rows: Tensor, scale: Tensor, height: int) -> BlockNumbers:
        """Make numbers of a scale for each output, (..., N, G); holds one of `height` where these are alike."""
        outputs = rows.shape[-2]
        if outputs % height == 0:
            blocks = scale.unflatten(-2, (-1, height))
            if bool((blocks == blocks[..., :1, :]).all()):
                scale = blocks[..., 0, :].contiguous()
        return cls(rows, scale)

    @property
    def outputs_per_scale(self) -> int:
        """Outputs of a block."""
        return self.rows.shape[-2] // self.scale.shape[-2]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.rows.shape[-1] // self.scale.shape[-1]

    def by_row(self) -> Tensor:
        """Return a scale for each output, (..., N, G)."""
        return self.scale.repeat_interleave(self.outputs_per_scale, dim=-2)

    def dequantized(self) -> Tensor:
        """Return the numbers in float32."""
        return (self.rows.float().unflatten(-1, (self.scale.shape[-1], -1)) * self.by_row().unsqueeze(-1)).flatten(-2)

    def outputs_alone(self, outputs: slice) -> BlockNumbers:
        """Return these outputs of one matrix, sharing memory where blocks stay whole."""
        start, stop, _ = outputs.indices(self.rows.shape[0])
        height = self.outputs_per_scale
        if start % height or stop % height:
            return BlockNumbers(self.rows[start:stop], self.by_row()[start:stop].contiguous())
        return BlockNumbers(self.rows[start:stop], self.scale[start // height : stop // height])


def concatenated(numbers: Sequence[BlockNumbers]) -> BlockNumbers:
    """Join matrices with the same groups of inputs, outputs in order."""
    # Joined as bytes: not every version of PyTorch concatenates FP8.
    rows = torch.cat([each.rows.view(torch.uint8) for each in numbers]).view(FP8)
    alike = len({each.outputs_per_scale for each in numbers}) == 1
    return BlockNumbers(rows, torch.cat([each.scale if alike else each.by_row() for each in numbers]))


def rounded_groups(x_TK: Tensor, groups: int, unit: int = 1) -> tuple[Tensor, Tensor]:
    """Return FP8 (T, K) and float32 scales (G, T) whose product is x up to rounding; each group's maximum becomes 448.

    A group of zeros stays zero. With a `unit` rows of zeros are added up to a multiple of it, on a GPU.
    """
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import float8_block_kernel

        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        rows = x_TK.shape[0] + -x_TK.shape[0] % unit
        out_TK = torch.empty((rows, x_TK.shape[1]), dtype=FP8, device=x_TK.device)
        scale_GT = torch.empty((groups, rows), dtype=torch.float32, device=x_TK.device)
        float8_block_kernel.rounded_groups(x_TK, out_TK, scale_GT)
        return out_TK, scale_GT
    exact = x_TK.float().unflatten(1, (groups, -1))
    scale_TG = scale_of(exact.abs().amax(-1))
    return in_steps(exact, scale_TG).flatten(1), scale_TG.t().contiguous()


def _exact(rounded_TK: Tensor, scale_GT: Tensor) -> Tensor:
    """Return rounded activations in float32."""
    return (rounded_TK.float().unflatten(1, (scale_GT.shape[0], -1)) * scale_GT.t().unsqueeze(-1)).flatten(1)


def _linear(x: Tensor, weight_NK: Tensor, scale_BG: Tensor, bias_N: Tensor | None) -> Tensor:
    numbers = BlockNumbers(weight_NK, scale_BG)
    rows, groups = x.numel() // x.shape[-1], scale_BG.shape[1]
    x_TK = x.reshape(rows, x.shape[-1])
    platform = platform_of(x.device)
    if not platform.has_triton:
        exact_TN = _exact(*rounded_groups(x_TK, groups)) @ numbers.dequantized().t()
        y_TN = (exact_TN if bias_N is None else exact_TN + bias_N).to(x.dtype)
    elif rows > MANY_ROWS and platform.fp8_block_products and _library_takes(numbers):
        rounded_TK, x_scale_GT = rounded_groups(x_TK, groups, ALIGNED)
        # Products of the library have no bias.
        y_TN = torch._scaled_mm(
            rounded_TK, weight_NK.t(), scale_a=x_scale_GT.t(), scale_b=scale_BG.t(), out_dtype=x.dtype
        )[:rows]
        y_TN = y_TN if bias_N is None else y_TN.add_(bias_N)
    else:
        from beheld.quant import float8_block_kernel

        y_TN = x.new_empty((rows, weight_NK.shape[0]))
        count = platform.kernel_facts(x.device).multiprocessors
        float8_block_kernel.product(
            *rounded_groups(x_TK, groups), weight_NK, scale_BG, numbers.outputs_per_scale, bias_N, y_TN, count
        )
    return y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def _library_takes(numbers: BlockNumbers) -> bool:
    """Return whether torch's products accept these blocks; it wants scales in rows of 16 bytes."""
    return (numbers.outputs_per_scale, numbers.group) == _LIBRARY_BLOCK and numbers.scale.shape[1] % 4 == 0


def _linear_shape(x: Tensor, weight_NK: Tensor, scale_BG: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


def _grouped(
    x_TK: Tensor, weight_ENK: Tensor, scale_EBG: Tensor, order_S: Tensor, starts_E1: Tensor, share: int
) -> Tensor:
    """Return (S, N): slot s is row s // share of x times its expert's matrix; slots without one are undefined."""
    numbers = BlockNumbers(weight_ENK, scale_EBG)
    slots, groups = order_S.shape[0], scale_EBG.shape[-1]
    y_SN = x_TK.new_empty((slots, weight_ENK.shape[1]))
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import float8_block_kernel

        float8_block_kernel.grouped_product(
            *rounded_groups(x_TK, groups),
            weight_ENK,
            scale_EBG.flatten(0, 1),
            numbers.outputs_per_scale,
            order_S,
            starts_E1,
            y_SN,
            share,
        )
        return y_SN
    exact_TK = _exact(*rounded_groups(x_TK, groups))
    for expert, (start, stop) in enumerate(itertools.pairwise(starts_E1.tolist())):
        slots_M = order_S[start:stop]
        weight_NK = BlockNumbers(weight_ENK[expert], scale_EBG[expert]).dequantized()
        y_SN[slots_M] = (exact_TK[slots_M // share] @ weight_NK.t()).to(x_TK.dtype)
    return y_SN


def _grouped_shape(
    x_TK: Tensor, weight_ENK: Tensor, scale_EBG: Tensor, order_S: Tensor, starts_E1: Tensor, share: int
) -> Tensor:
    """Describe the result for torch.compile."""
    return x_TK.new_empty((order_S.shape[0], weight_ENK.shape[1]))


# Registered operators, so that torch.compile sees opaque calls.
operators.register(
    "float8_block_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor", _linear, _linear_shape
)
operators.register(
    "float8_block_grouped(Tensor x, Tensor weight, Tensor scale, Tensor order, Tensor starts, int share) -> Tensor",
    _grouped,
    _grouped_shape,
)


class BlockFloat8Linear(StoredLinear):
    """A linear layer that stores its weights in FP8 with a scale for each block, and multiplies in FP8.

    Attributes:
        rows_NK, scale_BG: see BlockNumbers.
    """

    def __init__(self, numbers: BlockNumbers, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(numbers.rows.shape, bias_N, dtype, numbers.rows.device)
        self.rows_NK = nn.Parameter(numbers.rows, requires_grad=False)
        self.scale_BG = nn.Parameter(numbers.scale, requires_grad=False)

    @property
    def numbers(self) -> BlockNumbers:
        """Return the weights' numbers, sharing memory."""
        return BlockNumbers(self.rows_NK.data, self.scale_BG.data)

    def joins(self, other: StoredLinear) -> bool:
        """Return whether the other layer has groups of the same size."""
        return isinstance(other, BlockFloat8Linear) and other.numbers.group == self.numbers.group

    @classmethod
    def joined(cls, layers: Sequence[BlockFloat8Linear]) -> BlockFloat8Linear:
        """Join several layers with the same input into one; exact, because each output keeps its scales."""
        return cls(concatenated([layer.numbers for layer in layers]), joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> BlockFloat8Linear:
        """Return a layer of these outputs alone, sharing the numbers' memory."""
        return BlockFloat8Linear(self.numbers.outputs_alone(outputs), bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.numbers.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        y: Tensor = torch.ops.beheld.float8_block_linear(x, self.rows_NK, self.scale_BG, self.bias)
        return y


class BlockFloat8Experts(StoredExperts):
    """FP8 experts with a scale for each block in place of transformers' experts; gate and up are one matrix.

    The experts' own method computes what happens between the two products.

    Args:
        experts: the module that this one replaces; its weights are gone.
        gate_up, down: all experts' numbers, (E, N, K).
        dtype: of the activations.
    """

    _names: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    def __init__(self, experts: nn.Module, gate_up: BlockNumbers, down: BlockNumbers, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = experts
        self.dtype = dtype
        for name, numbers in zip(self._names, (gate_up, down), strict=True):
            self.register_parameter(f"{name}_rows", nn.Parameter(numbers.rows, requires_grad=False))
            self.register_parameter(f"{name}_scale", nn.Parameter(numbers.scale, requires_grad=False))
        self.num_experts: int = gate_up.rows.shape[0]

    def _numbers(self, name: str) -> BlockNumbers:
        return BlockNumbers(getattr(self, f"{name}_rows").data, getattr(self, f"{name}_scale").data)

    def part(self, experts: slice) -> BlockFloat8Experts:
        """Return a module of these experts alone, sharing memory."""
        both = [self._numbers(name) for name in self._names]
        gate_up, down = (BlockNumbers(each.rows[experts], each.scale[experts]) for each in both)
        return BlockFloat8Experts(self.experts, gate_up, down, self.dtype)

    def restored(self) -> nn.Module:
        """Return transformers' module with the dequantized weights."""
        for name in self._names:
            weight = self._numbers(name).dequantized().to(self.dtype)
            setattr(self.experts, f"{name}_proj", nn.Parameter(weight, requires_grad=False))
        return self.experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K)."""
        choices = top_k_index.shape[-1]
        order_S, starts_E1 = torch.ops.beheld.expert_slots(top_k_index, self.num_experts)
        grouped = torch.ops.beheld.float8_block_grouped
        inner_SN = grouped(hidden_states, self.gate_up_rows, self.gate_up_scale, order_S, starts_E1, choices)
        gated_SK = self.experts._apply_gate(inner_SN)  # type: ignore[operator]
        out_SK = grouped(gated_SK, self.down_rows, self.down_scale, order_S, starts_E1, 1)
        return self._summed(out_SK, top_k_index, top_k_weights).to(hidden_states.dtype)
