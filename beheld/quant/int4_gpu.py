"""Linear layers with 4-bit weights in groups on a GPU: the dequantized weights, read in a quarter of the bytes.

Activations are not rounded. Up to MOST_ROWS rows a kernel dequantizes in registers (int4_kernel.py); with more, the
weights are dequantized for the call and a library multiplies them.

Shapes: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from beheld.platform.registry import platform_of
from beheld.quant.grouped import GroupedForm, GroupedNumbers, concatenated, rounded
from beheld.quant.linear import ShardUnits, StoredLinear, joined_bias, plain

MOST_ROWS = 512
GROUPS = (32, 64, 128)
# Outputs are multiples of this.
_ALIGNED = 16


def fits(form: GroupedForm, outputs: int) -> bool:
    """Return whether the kernel multiplies weights of this form."""
    return form.bits == 4 and form.inputs // form.groups in GROUPS and outputs % _ALIGNED == 0


def packed(numbers_NK: Tensor, groups: int) -> Tensor:
    """Return bytes (N, K / 2) in the kernel's order."""
    early, late = numbers_NK.unflatten(1, (groups, 2, -1)).unbind(2)
    return (early | (late << 4)).flatten(1)


def unpacked(weight_NX: Tensor, groups: int) -> Tensor:
    """Return whole numbers (N, K) of `packed`'s bytes."""
    bytes_ = weight_NX.unflatten(1, (groups, -1))
    return torch.stack([bytes_ & 15, bytes_ >> 4], 2).flatten(1)


def _linear(x: Tensor, weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor, bias_N: Tensor | None) -> Tensor:
    from beheld.quant import int4_kernel

    outputs, inputs = weight_NX.shape[0], 2 * weight_NX.shape[1]
    x_TK = x.reshape(-1, inputs)
    if x_TK.shape[0] > MOST_ROWS:
        weight_NK = torch.empty((outputs, inputs), dtype=x.dtype, device=x.device)
        int4_kernel.dequantized(weight_NX, scale_GN, low_GN, weight_NK)
        return nn.functional.linear(x, weight_NK, bias_N)
    y_TN = x.new_empty((x_TK.shape[0], outputs))
    count = platform_of(x.device).kernel_facts(x.device).multiprocessors
    int4_kernel.product(x_TK.contiguous(), weight_NX, scale_GN, low_GN, bias_N, y_TN, count)
    return y_TN.view(*x.shape[:-1], outputs)


def _linear_shape(x: Tensor, weight_NX: Tensor, scale_GN: Tensor, low_GN: Tensor, bias_N: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x.new_empty((*x.shape[:-1], weight_NX.shape[0]))


# A registered operator, so that torch.compile sees an opaque call.
_library = torch.library.Library("beheld", "FRAGMENT")
_library.define("int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor low, Tensor? bias) -> Tensor")
_library.impl("int4_linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("beheld::int4_linear", _linear_shape, lib=_library)


class Int4GPULinear(StoredLinear):
    """A linear layer that keeps 4-bit weights on a GPU.

    Attributes:
        weight_NX, scale_GN, low_GN: bytes in the kernel's order, and float16.
        weight: empty; gives type and device to models that ask for them.
    """

    weight_NX: nn.Parameter
    scale_GN: nn.Parameter
    low_GN: nn.Parameter
    order_K: Tensor | None

    def __init__(self, numbers: GroupedNumbers, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = numbers.numbers_NK.shape
        self.form = numbers.form
        device = numbers.numbers_NK.device
        both = (each.t().contiguous().to(_scale_type(each)) for each in (numbers.scale_NG, numbers.low_NG))
        fields = (packed(numbers.numbers_NK, self.form.groups), *both)
        for name, field in zip(("weight_NX", "scale_GN", "low_GN"), fields, strict=True):
            self.register_parameter(name, nn.Parameter(field, requires_grad=False))
        self.register_buffer("order_K", None if numbers.order_K is None else numbers.order_K.to(device))
        self.bias = None if bias_N is None else nn.Parameter(bias_N, requires_grad=False)
        self.weight = torch.empty(0, dtype=dtype, device=device)

    @classmethod
    def of(cls, linear: nn.Linear, bits: int, group: int) -> Int4GPULinear:
        """Round the weights of a plain linear layer, in groups of this size."""
        bias = None if linear.bias is None else linear.bias.data
        return cls(rounded(linear.weight.data, bits, group), bias, linear.weight.dtype)

    @property
    def numbers(self) -> GroupedNumbers:
        """Return the weights' numbers, copied."""
        whole = unpacked(self.weight_NX.data, self.form.groups)
        scale_NG, low_NG = (each.data.t().float().contiguous() for each in (self.scale_GN, self.low_GN))
        return GroupedNumbers(whole, scale_NG, low_NG, self.form.bits, self.order_K)

    @property
    def units(self) -> ShardUnits:
        """Return what the kernel aligns outputs to, and the size of a group."""
        return ShardUnits(_ALIGNED, self.in_features // self.form.groups)

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
        numbers = self.numbers.outputs_alone(outputs)
        return Int4GPULinear(numbers, None if self.bias is None else self.bias.data[outputs], self.weight.dtype)

    def input_part(self, inputs: slice) -> Int4GPULinear:
        """Return a layer of these inputs alone, whole groups; inputs in another order cannot be cut."""
        return Int4GPULinear(self.numbers.inputs_alone(inputs), None, self.weight.dtype)

    def restored(self) -> nn.Module:
        """Return a plain linear layer with the dequantized weights."""
        weight_NK = self.numbers.dequantized().to(self.weight.dtype)
        return plain(weight_NK, None if self.bias is None else self.bias.data)

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
