"""Linear layers with int8 weights on a GPU, a scale for each output, times activations that are rounded to int8.

    x = step_T q_x      W = scale_N q_W      x W^T = (q_x q_W^T) step_T scale_N

A row's largest number becomes 127 steps. Sums are of whole numbers and exact; what scales them is float32, the same
whatever multiplies. So a row's result has the same bits alone and among others: see int8_kernel.py.

Devices without Triton multiply the same numbers in float64; tests compare with that.

Shapes: T rows of x, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant.grouped import GroupedNumbers
from beheld.quant.linear import StoredLinear, bias_of, joined_bias

# Both sizes are multiples of this: tensor cores, and copies of whole tiles, require it.
ALIGNED = 16
# A sum of products fits 32 bits up to so many inputs, also with weights of -128.
MOST_INPUTS = 1 << 17
MOST = 127.0
# A row of zeros has this divided by MOST as its step.
_LEAST = 1e-30
# Up to so many rows the kernel that divides the inputs among programs takes less than that of whole tiles.
_FEW_ROWS = 64


def fits(outputs: int, inputs: int) -> bool:
    """Return whether the kernels multiply weights of these sizes."""
    return outputs % ALIGNED == 0 == inputs % ALIGNED and 0 < inputs <= MOST_INPUTS


def kept_bytes(outputs: int, inputs: int) -> int:
    """Return the bytes of a weight and its scales, which are float32."""
    return outputs * (inputs + 4)


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (T, K) and float32 steps (T,) whose product is x up to half a step; each row's largest becomes 127.

    A row of zeros stays zero, and one with NaN or infinity has NaN or infinity as its step.
    """
    if platform_of(x_TK.device).has_triton:
        from beheld.quant import int8_kernel

        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        out_TK = torch.empty(x_TK.shape, dtype=torch.int8, device=x_TK.device)
        step_T = torch.empty(x_TK.shape[0], dtype=torch.float32, device=x_TK.device)
        int8_kernel.rounded_rows(x_TK, out_TK, step_T)
        return out_TK, step_T
    exact_TK = x_TK.float()
    step_T = exact_TK.abs().amax(-1).clamp(min=_LEAST) / MOST
    # The steps' reciprocals are multiplied, as kernels do, for which a division of each number takes long.
    return (exact_TK * (1 / step_T).unsqueeze(1)).round().to(torch.int8), step_T


def product(x_TK: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return x W^T + bias, (T, N), in the type of x."""
    (rows, _), outputs = x_TK.shape, weight_NK.shape[0]
    if rows == 1 and outputs % ALIGNED == 0 and platform_of(x_TK.device).has_triton:
        return _one_row(x_TK[0], weight_NK, scale_N, bias_N, None).unsqueeze(0)
    whole_TK, step_T = rounded_rows(x_TK)
    if not platform_of(x_TK.device).has_triton:
        # Products of so few bits are exact in float64, and so is their sum.
        sum_TN = whole_TK.double() @ weight_NK.double().t()
        exact_TN = sum_TN.float() * step_T.unsqueeze(1) * scale_N
        return (exact_TN if bias_N is None else exact_TN + bias_N.float()).to(x_TK.dtype)
    from beheld.quant import int8_kernel

    y_TN = x_TK.new_empty((rows, outputs))
    facts = platform_of(x_TK.device).kernel_facts(x_TK.device)
    given = whole_TK, step_T, weight_NK, scale_N, bias_N, y_TN, facts.multiprocessors
    if rows <= _FEW_ROWS:
        int8_kernel.few_rows(*given)
    else:
        int8_kernel.many_rows(*given, int8_kernel.many_tiles(facts.warpgroup_products))
    return y_TN


def _one_row(
    x_K: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, residual_N: Tensor | None
) -> Tensor:
    """Return x W^T + bias (+ residual), (N,), on a device with Triton."""
    from beheld.quant import int8_kernel, int8_row_kernel

    x_1K, bias_N = x_K.reshape(1, -1).contiguous(), None if bias_N is None else bias_N.contiguous()
    early = platform_of(x_K.device).kernel_facts(x_K.device).early_launch
    whole_1K = torch.empty(x_1K.shape, dtype=torch.int8, device=x_K.device)
    step_1 = torch.empty(1, dtype=torch.float32, device=x_K.device)
    int8_kernel.rounded_rows(x_1K, whole_1K, step_1, early=early)
    y_N = x_K.new_empty(weight_NK.shape[0])
    int8_row_kernel.row(whole_1K, step_1, weight_NK, scale_N, bias_N, residual_N, y_N, early=early)
    return y_N


def _linear(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    y_TN = product(x.reshape(-1, x.shape[-1]), weight_NK, scale_N, bias_N)
    return y_TN.view(*x.shape[:-1], weight_NK.shape[0])


def _linear_shape(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NK.shape[0]))


# A registered operator, so that torch.compile sees an opaque call.
operators.register("int8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor", _linear, _linear_shape)


class Int8GPULinear(StoredLinear):
    """A linear layer that keeps int8 weights on a GPU, and rounds its input to int8 by row.

    Attributes:
        rows_NK, scale_N: int8, and each output's scale in float32.
    """

    def __init__(self, rows_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(rows_NK.shape, bias_N, dtype, rows_NK.device)
        self.rows_NK = nn.Parameter(rows_NK, requires_grad=False)
        self.scale_N = nn.Parameter(scale_N, requires_grad=False)

    @classmethod
    def of_numbers(cls, numbers: GroupedNumbers, bias_N: Tensor | None, dtype: torch.dtype) -> Int8GPULinear:
        """Return the layer of numbers of 8 bits around 128 whose groups share an output's scale."""
        # The highest bit turned over takes 128 off.
        rows_NK = (numbers.numbers_NK ^ 128).view(torch.int8)
        return cls(rows_NK, numbers.scale_NG[:, 0].contiguous(), bias_N, dtype)

    @classmethod
    def joined(cls, layers: Sequence[Int8GPULinear]) -> Int8GPULinear:
        """Join several layers with the same input into one; exact, because each output keeps its scale."""
        rows_NK = torch.cat([layer.rows_NK.data for layer in layers])
        scale_N = torch.cat([layer.scale_N.data for layer in layers])
        return cls(rows_NK, scale_N, joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> Int8GPULinear:
        """Return a layer of these outputs alone, sharing memory."""
        rows_NK, scale_N = self.rows_NK.data[outputs], self.scale_N.data[outputs]
        return Int8GPULinear(rows_NK, scale_N, bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.rows_NK.data.float() * self.scale_N.data.unsqueeze(1)

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """Return residual + product, (N,), of one row; the sum takes no launch of its own."""
        return _one_row(x_K, self.rows_NK, self.scale_N, self.bias, residual_N)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        y: Tensor = torch.ops.beheld.int8_linear(x, self.rows_NK, self.scale_N, self.bias)
        return y
