"""Products of FP8 numbers: activations rounded with one scale per row, times FP8 weights.

A product: x = q_x s_x and W = q_W s_W with q in FP8 (float8_e4m3fn), one s per row of x and per output of W. Then x W^T
= (q_x q_W^T) s_x s_W, and the sums are over products of FP8 numbers.

Devices without FP8 kernels multiply the same numbers in float32; tests compare with that.

Shapes: T rows of x, S slots (see float8_kernel.py), G groups, K inputs, N outputs, C choices per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant.linear import StoredExperts, StoredLinear, bias_of, joined_bias

FP8 = torch.float8_e4m3fn
MOST = 448.0
# The smallest scale, whose reciprocal is finite.
_LEAST = 2.0**-126
# A GPU's FP8 products require sizes that are multiples of this.
ALIGNED = 16
# Up to so many rows a kernel of ours takes less than the library: 99 and 157 microseconds for 8 rows and a layer of 7B
# on an H200, 108 and 151 for 64; 152 and 145 for 128. bfloat16 takes 133, 136 and 140.
_FEW_ROWS = 64
_FEW_ALIGNED = 32


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 (T, K) and float32 scales (T,) whose product is x up to rounding; each row's maximum becomes 448.

    This is the dynamic per-token scale of compressed-tensors; a row of zeros stays zero.
    """
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import float8_kernel

        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        out_TK = torch.empty(x_TK.shape, dtype=FP8, device=x_TK.device)
        scale_T = torch.empty(x_TK.shape[0], dtype=torch.float32, device=x_TK.device)
        float8_kernel.rounded_rows(x_TK, out_TK, scale_T)
        return out_TK, scale_T
    exact_TK = x_TK.float()
    scale_T = scale_of(exact_TK.abs().amax(-1))
    return in_steps(exact_TK, scale_T), scale_T


def scale_of(largest: Tensor) -> Tensor:
    """Return the scales of rows or groups, in float32, whose largest numbers become 448; zeros stay zero."""
    return torch.where(largest > 0, (largest / MOST).clamp(min=_LEAST), torch.ones_like(largest))


def in_steps(exact: Tensor, scale: Tensor) -> Tensor:
    """Return FP8 numbers whose product with the scales of the last dimension is `exact` up to rounding.

    The scales' reciprocals are multiplied, as kernels do, for which a division of each number takes long.
    """
    return (exact * (1 / scale).unsqueeze(-1)).clamp(-MOST, MOST).to(FP8)


def _linear(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    x_TK, x_scale_T = rounded_rows(x.reshape(-1, x.shape[-1]))
    if not platform_of(x.device).has_triton:
        exact_TN = (x_TK.float() @ weight_NK.float().t()) * x_scale_T.unsqueeze(1) * scale_N
        y_TN = (exact_TN if bias_N is None else exact_TN + bias_N).to(x.dtype)
    elif x_TK.shape[0] <= _FEW_ROWS and x_TK.shape[1] % _FEW_ALIGNED == 0:
        from beheld.quant import float8_block_kernel

        y_TN = x.new_empty((x_TK.shape[0], weight_NK.shape[0]))
        multiprocessors = platform_of(x.device).kernel_facts(x.device).multiprocessors
        given = x_TK, x_scale_T, weight_NK, scale_N, bias_N, y_TN
        float8_block_kernel.product_by_output(*given, multiprocessors)
    else:
        y_TN = torch._scaled_mm(
            x_TK,
            weight_NK.t(),
            scale_a=x_scale_T.unsqueeze(1),
            scale_b=scale_N.unsqueeze(0),
            bias=bias_N,
            out_dtype=x.dtype,
        )
    return y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def _linear_shape(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


def _division(groups_TC: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return slots sorted by group (S,), and where each group starts there plus the end of the last (G + 1,).

    Slots of a group that does not exist come last and belong to no group.
    """
    sorted_S, order_S = groups_TC.flatten().sort(stable=True)
    bounds_G1 = torch.arange(num_groups + 1, device=groups_TC.device, dtype=sorted_S.dtype)
    return order_S, torch.searchsorted(sorted_S, bounds_G1, out_int32=True)


def _division_shape(groups_TC: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Describe the result for torch.compile."""
    order_S = groups_TC.new_empty(groups_TC.numel(), dtype=torch.int64)
    return order_S, groups_TC.new_empty(num_groups + 1, dtype=torch.int32)


def _grouped(
    x_TK: Tensor, weight_GNK: Tensor, scale_GN: Tensor, order_S: Tensor, starts_G1: Tensor, share: int
) -> Tensor:
    """Return (S, N): slot s is row s // share of x times its group's matrix; slots without a group are undefined."""
    rounded_TK, x_scale_T = rounded_rows(x_TK)
    y_SN = x_TK.new_empty((order_S.shape[0], weight_GNK.shape[1]))
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import float8_kernel

        float8_kernel.grouped_product(rounded_TK, x_scale_T, weight_GNK, scale_GN, order_S, starts_G1, y_SN, share)
        return y_SN
    starts = starts_G1.tolist()
    for group, (start, stop) in enumerate(itertools.pairwise(starts)):
        slots = order_S[start:stop]
        rows = slots // share
        y_MN = rounded_TK[rows].float() @ weight_GNK[group].float().t()
        y_SN[slots] = (y_MN * x_scale_T[rows].unsqueeze(1) * scale_GN[group]).to(x_TK.dtype)
    return y_SN


def _grouped_shape(
    x_TK: Tensor, weight_GNK: Tensor, scale_GN: Tensor, order_S: Tensor, starts_G1: Tensor, share: int
) -> Tensor:
    """Describe the result for torch.compile."""
    return x_TK.new_empty((order_S.shape[0], weight_GNK.shape[1]))


# Registered operators, so that torch.compile sees opaque calls.
operators.register(
    "float8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor", _linear, _linear_shape
)
operators.register("float8_division(Tensor groups, int num_groups) -> (Tensor, Tensor)", _division, _division_shape)
operators.register(
    "float8_grouped(Tensor x, Tensor weight, Tensor scale, Tensor order, Tensor starts, int share) -> Tensor",
    _grouped,
    _grouped_shape,
)


class Float8Linear(StoredLinear):
    """A linear layer that stores its weights in FP8 and multiplies in FP8.

    Attributes:
        rows_NK, scale_N: FP8 numbers, and each output's scale in float32.
    """

    def __init__(self, rows_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rows_NK.shape, bias_N, dtype, rows_NK.device)
        self.rows_NK = nn.Parameter(rows_NK, requires_grad=False)
        self.scale_N = nn.Parameter(scale_N, requires_grad=False)

    @classmethod
    def joined(cls, layers: Sequence[Float8Linear]) -> Float8Linear:
        """Join several layers with the same input into one; exact, because each row keeps its scale."""
        # Joined as bytes: not every version of PyTorch concatenates FP8.
        rows = torch.cat([layer.rows_NK.data.view(torch.uint8) for layer in layers]).view(FP8)
        scale = torch.cat([layer.scale_N.data for layer in layers])
        return cls(rows, scale, joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> Float8Linear:
        """Return a layer of these outputs alone, sharing memory."""
        rows_NK, scale_N = self.rows_NK.data[outputs], self.scale_N.data[outputs]
        return Float8Linear(rows_NK, scale_N, bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.rows_NK.data.float() * self.scale_N.data.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        y: Tensor = torch.ops.beheld.float8_linear(x, self.rows_NK, self.scale_N, self.bias)
        return y


class Float8Experts(StoredExperts):
    """FP8 experts in place of transformers' experts; gate and up are one matrix.

    The experts' own method computes what happens between the two products.

    Args:
        experts: the module that this one replaces; its weights are gone.
        gate_up, down: FP8 rows (G, N, K) and scales (G, N) of each.
        dtype: of the activations.
    """

    def __init__(
        self,
        experts: nn.Module,
        gate_up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.dtype = dtype
        for name, (rows_GNK, scale_GN) in {"gate_up": gate_up, "down": down}.items():
            self.register_parameter(f"{name}_rows", nn.Parameter(rows_GNK, requires_grad=False))
            self.register_parameter(f"{name}_scale", nn.Parameter(scale_GN, requires_grad=False))
        self.num_experts: int = gate_up[0].shape[0]

    def part(self, experts: slice) -> Float8Experts:
        """Return a module of these experts alone, sharing memory."""
        pairs = [
            (getattr(self, f"{name}_rows").data[experts], getattr(self, f"{name}_scale").data[experts])
            for name in ("gate_up", "down")
        ]
        return Float8Experts(self.experts, pairs[0], pairs[1], self.dtype)

    def restored(self) -> nn.Module:
        """Return transformers' module with the dequantized weights."""
        for name in ("gate_up", "down"):
            rows, scale = (getattr(self, f"{name}_{part}").data for part in ("rows", "scale"))
            weight = (rows.float() * scale.unsqueeze(-1)).to(self.dtype)
            weight = weight.transpose(1, 2).contiguous() if getattr(self.experts, "is_transposed", False) else weight
            setattr(self.experts, f"{name}_proj", nn.Parameter(weight, requires_grad=False))
        return self.experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts: hidden_states (T, K), choices (T, C) and their weights -> (T, K)."""
        choices = top_k_index.shape[-1]
        order_S, starts_G1 = torch.ops.beheld.float8_division(top_k_index, self.num_experts)
        inner_SN = torch.ops.beheld.float8_grouped(
            hidden_states, self.gate_up_rows, self.gate_up_scale, order_S, starts_G1, choices
        )
        gated_SK = self.experts._apply_gate(inner_SN)  # type: ignore[operator]
        out_SK = torch.ops.beheld.float8_grouped(gated_SK, self.down_rows, self.down_scale, order_S, starts_G1, 1)
        return self._summed(out_SK, top_k_index, top_k_weights).to(hidden_states.dtype)
