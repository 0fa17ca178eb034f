"""Linear layers with 4-bit weights in groups on a GPU: the dequantized weights, read in a quarter of the bytes.

Activations are not rounded. Up to MOST_ROWS rows a kernel unpacks weights in registers (int4_kernel.py); with more,
they are dequantized for the call and a library multiplies them.

Shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from beheld.platform import operators
from beheld.platform.registry import platform_of
from beheld.quant.grouped import GroupedForm, GroupedNumbers, concatenated, rounded
from beheld.quant.linear import StoredLinear, bias_of, joined_bias

MOST_ROWS = 192
GROUPS = (32, 64, 128)
# Outputs are multiples of this, and lie in blocks of it; inputs in blocks of the second.
_ALIGNED, _BLOCK = 16, 128


def fits(form: GroupedForm, outputs: int) -> bool:
    """Return whether the kernel multiplies weights of this form."""
    return form.bits == 4 and form.inputs // form.groups in GROUPS and outputs % _ALIGNED == 0


def packed(numbers_NK: Tensor) -> Tensor:
    """Return int32 (N, 16 C) in the kernel's order, C blocks of inputs; the last is filled up."""
    outputs, inputs = numbers_NK.shape
    whole = nn.functional.pad(numbers_NK, (0, -inputs % _BLOCK))
    parts = whole.view(outputs // _ALIGNED, _ALIGNED, -1, 4, _BLOCK // 4).unbind(3)
    low, high = (parts[0] | (parts[1] << 4), parts[2] | (parts[3] << 4))
    # Two bytes of each number, four of each word: little-endian.
    return torch.stack([low, high], -1).transpose(1, 2).flatten(3).contiguous().view(torch.int32).view(outputs, -1)


def unpacked(weight_NX: Tensor, inputs: int) -> Tensor:
    """Return whole numbers (N, K) of what `packed` returned."""
    outputs = weight_NX.shape[0]
    bytes_ = weight_NX.reshape(outputs // _ALIGNED, -1, _ALIGNED, _BLOCK // 8).view(torch.uint8)
    low, high = bytes_.unflatten(-1, (-1, 2)).unbind(-1)
    parts = torch.stack([low & 15, low >> 4, high & 15, high >> 4], 3)
    return parts.transpose(1, 2).reshape(outputs, -1)[:, :inputs].contiguous()


def _linear(x: Tensor, weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor | None, bias_N: Tensor | None) -> Tensor:
    from beheld.quant import int4_kernel

    outputs, inputs = weight_NX.shape[0], x.shape[-1]
    x_TK = x.reshape(-1, inputs)
    if x_TK.shape[0] > MOST_ROWS:
        weight_NK = torch.empty((outputs, inputs), dtype=x.dtype, device=x.device)
        int4_kernel.dequantized(weight_NX, scale_GN, low_GN, weight_NK)
        return nn.functional.linear(x, weight_NK, bias_N)
    return _multiplied(x_TK, weight_NX, scale_GN, low_GN, bias_N, None).view(*x.shape[:-1], outputs)


def _multiplied(
    x_TK: Tensor,
    weight_NX: Tensor,
    scale_GN: Tensor,
    low_GN: Tensor | None,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
) -> Tensor:
    from beheld.quant import int4_kernel

    x_TK = x_TK.contiguous()
    if x_TK.storage_offset() % 2:
        # The kernel reads two inputs at a time.
        x_TK = x_TK.clone()
    y_TN = x_TK.new_empty((x_TK.shape[0], weight_NX.shape[0]))
    facts = platform_of(x_TK.device).kernel_facts(x_TK.device)
    bias_N = None if bias_N is None else bias_N.contiguous()
    fields = x_TK, weight_NX, scale_GN, low_GN, bias_N, y_TN, facts.multiprocessors
    int4_kernel.product(*fields, early=facts.early_launch, residual_TN=residual_TN)
    return y_TN


def _linear_shape(
    x: Tensor, weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor | None, bias_N: Tensor | None
) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NX.shape[0]))


# A registered operator, so that torch.compile sees an opaque call.
operators.register(
    "int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor? low, Tensor? bias) -> Tensor", _linear, _linear_shape
)


class Int4GPULinear(StoredLinear):
    """A linear layer that keeps 4-bit weights on a GPU.

    Attributes:
        weight_NX, scale_GN: int32 in the kernel's order, and float16, or float32 if that holds no scales so small.
        low_GN: as the scales; None if each is -8 times its scale.
    """

    weight_NX: nn.Parameter
    scale_GN: nn.Parameter
    low_GN: nn.Parameter | None
    order_K: Tensor | None

    def __init__(self, numbers: GroupedNumbers, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        device = numbers.numbers_NK.device
        super().__init__(numbers.numbers_NK.shape, bias_N, dtype, device)
        self.form = numbers.form
        scale_GN, low_GN = (each.t().contiguous() for each in (numbers.scale_NG, numbers.low_NG))
        fields = {"weight_NX": packed(numbers.numbers_NK), "scale_GN": scale_GN.to(_scale_type(scale_GN))}
        for name, field in fields.items():
            self.register_parameter(name, nn.Parameter(field, requires_grad=False))
        centered = torch.equal(low_GN, -8 * scale_GN)
        low = None if centered else nn.Parameter(low_GN.to(_scale_type(low_GN)), requires_grad=False)
        self.register_parameter("low_GN", low)
        self.register_buffer("order_K", None if numbers.order_K is None else numbers.order_K.to(device))

    @classmethod
    def of(cls, linear: nn.Linear, bits: int, group: int) -> Int4GPULinear:
        """Round the weights of a plain linear layer, in groups of this size."""
        return cls(rounded(linear.weight.data, bits, group), bias_of(linear), linear.weight.dtype)

    @property
    def numbers(self) -> GroupedNumbers:
        """Return the weights' numbers, copied."""
        whole = unpacked(self.weight_NX.data, self.in_features)
        scale_NG = self.scale_GN.data.t().float().contiguous()
        low_NG = -8 * scale_NG if self.low_GN is None else self.low_GN.data.t().float().contiguous()
        return GroupedNumbers(whole, scale_NG, low_NG, self.form.bits, self.order_K)

    def joins(self, other: StoredLinear) -> bool:
        """Return whether the other layer has the same form and order of inputs."""
        if not isinstance(other, Int4GPULinear) or other.form != self.form:
            return False
        mine, theirs = self.order_K, other.order_K
        return mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))

    @classmethod
    def joined(cls, layers: Sequence[Int4GPULinear]) -> Int4GPULinear:
        """Join several layers with the same input into one; exact, because each output keeps its scales."""
        numbers = concatenated([layer.numbers for layer in layers])
        return cls(numbers, joined_bias(layers), layers[0].weight.dtype)

    def part(self, outputs: slice) -> Int4GPULinear:
        """Return a layer of these outputs alone."""
        return Int4GPULinear(self.numbers.outputs_alone(outputs), bias_of(self, outputs), self.weight.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights, (N, K)."""
        return self.numbers.dequantized()

    def added(self, x_K: Tensor, residual_N: Tensor) -> Tensor:
        """Return residual + product, (N,), of one row; the sum takes no launch of its own."""
        if self.order_K is not None:
            x_K = x_K.index_select(-1, self.order_K)
        fields = self.weight_NX, self.scale_GN, self.low_GN, self.bias
        return _multiplied(x_K.unsqueeze(0), *fields, residual_N.unsqueeze(0)).squeeze(0)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> (..., N)."""
        if self.order_K is not None:
            x = x.index_select(-1, self.order_K)
        y: Tensor = torch.ops.beheld.int4_linear(x, self.weight_NX, self.scale_GN, self.low_GN, self.bias)
        return y


def _scale_type(scales: Tensor) -> torch.dtype:
    """Return float16 if it holds the scales with all of its bits, else float32."""
    sizes = scales.abs()
    least = torch.where(sizes > 0, sizes, 1.0).amin()
    return torch.float16 if float(sizes.amax()) < 6e4 and float(least) > 6.2e-5 else torch.float32
