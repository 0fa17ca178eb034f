"""Linear layers and convolutions in the form that the device computes fastest.

Results equal the original model's up to rounding.

Shapes: M rows of activations, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from beheld.models.one_row import StandIn
from beheld.models.surgery.operation import Changes
from beheld.platform import host
from beheld.quant import linear as stored
from beheld.quant.row_counts import MANY_ROWS, padded_rows, row_step

# Families make such layers, too.
linear_of = stored.linear_of

# Up to this many rows, a library's matrix product, which tiles over rows, leaves most of the CPU idle.
_SMALL_ROWS = 64


class SmallBatchLinear(StandIn):
    """A linear layer on a CPU that computes (W x^T)^T for few rows, so that tiles run along the many outputs.

    Measured on two AVX-512 cores, float32, 16 rows, 4096 x 1024: 170 GFLOP/s against 118 of `F.linear`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        if not 1 < rows <= _SMALL_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        x_MI = x.reshape(rows, self.in_features)
        if self.bias is None:
            y_OM = torch.mm(self.weight, x_MI.t())
        else:
            y_OM = torch.addmm(self.bias.unsqueeze(1), self.weight, x_MI.t())
        # Some models call .view on a layer's output.
        return y_OM.t().contiguous().view(*x.shape[:-1], self.out_features)


class PackedLinear(nn.Module):
    """A linear layer on a CPU whose weights are in oneDNN's blocked order, so that they are read in one stream.

    Measured on two AVX-512 cores, float32, 65536 x 1024: at 1, 16 and 832 rows 20, 243 and 363 GFLOP/s against 11, 65
    and 181 of `F.linear`; the error is that of float32. The order serves any number of rows. In bfloat16, one AVX-512
    core with BF16, 2048 x 11008: at 1, 4 and 16 rows 2.1, 1.9 and 4.2 ms against 4.0, 3.7 and 6.2.

    In bfloat16 a row's result has the same bits alone and among others: oneDNN sums a single row in another order than
    two or more, so a single row is computed as two.

    Attributes:
        weight: empty; gives type and device to models that ask for them.
        packed_bytes: the bytes of the weights.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight.data.new_empty(0)
        self.packed_bytes = linear.weight.numel() * linear.weight.element_size()
        self._fewest_rows = 1 if linear.weight.dtype == torch.float32 else 2
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.data.contiguous())

    def restored(self) -> nn.Linear:
        """Return a linear layer with the weights in their usual order."""
        return linear_of(self._packed.to_dense(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        padded = max(padded_rows(rows), self._fewest_rows)
        if padded == rows:
            return self._product(x)
        if rows == 1:
            x_1I = x.reshape(1, self.in_features)
            return self._product(torch.cat((x_1I, x_1I)))[:1].view(*x.shape[:-1], self.out_features)
        if rows >= MANY_ROWS and self.out_features < self.in_features:
            y_MO = self._in_two(x.reshape(rows, self.in_features), rows - rows % row_step(rows))
        else:
            y_MO = self._product(_padded(x, rows, padded))[:rows]
        return y_MO.view(*x.shape[:-1], self.out_features)

    def _in_two(self, x_MI: Tensor, whole: int) -> Tensor:
        """Process the first `whole` rows in place, then the others: the output is smaller to copy than the input."""
        return torch.cat([self._product(x_MI[:whole]), self(x_MI[whole:])])

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class PaddedLinear(StandIn):
    """A linear layer on a CPU in 16 bits that it does not multiply in hardware; pads rows to few distinct numbers.

    See padded_rows.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        padded = padded_rows(rows)
        if padded == rows:
            return nn.functional.linear(x, self.weight, self.bias)
        y_MO = nn.functional.linear(_padded(x, rows, padded), self.weight, self.bias)
        return y_MO[:rows].view(*x.shape[:-1], self.out_features)


def _padded(x: Tensor, rows: int, padded: int) -> Tensor:
    """Return x (..., I) as rows (padded, I) with zeros at the end."""
    return nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, padded - rows))


def can_pack() -> bool:
    """Return whether this PyTorch supports weights in oneDNN's order."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def restored(module: Any) -> nn.Module:
    """Return the module that `module` replaced, made from its weights; modules that replace others can do that."""
    made: nn.Module = module.restored()
    return made


def replace_linears(
    model: Any,
    kind: Callable[[nn.Linear], nn.Module],
    dtype: torch.dtype,
    changes: Changes,
) -> int:
    """Replace the linear layers of this type; returns how many.

    Layers are replaced one by one, so that only one layer's weights are ever held twice.
    """

    read = {id(child) for module in model.modules() for name, child in module.named_children() if _reads(module, name)}

    pages = host.FilePages()

    def made(child: Any) -> nn.Module | None:
        wanted = type(child) is nn.Linear and child.weight.dtype == dtype and child.weight.numel()
        if not wanted or id(child) in read:
            return None
        new = kind(child)
        pages.read(child.weight.data_ptr(), child.weight.nbytes)
        return new

    replaced = replace_children(model, made, changes)
    pages.end()
    return replaced


def _reads(module: nn.Module, name: str) -> bool:
    """Return whether a module multiplies a linear layer's weight itself, instead of calling the layer."""
    kind: Any = type(module)
    names = _forward_names(kind)
    # To read the text takes half a millisecond for each class.
    if names is not None and not names.issuperset(("linear", "weight", name)):
        return False
    return re.search(rf"\blinear\(.*\bself\.{name}\.weight\b", forward_text(kind)) is not None


@functools.cache
def _forward_names(kind: Any) -> frozenset[str] | None:
    """Return all names in the code of a class's forward; None if it is not Python's."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return None if code is None else frozenset(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


@functools.cache
def forward_text(kind: Any) -> str:
    """Return the text of a class's forward; empty if it has none."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def replace_children(model: nn.Module, made: Callable[[nn.Module], Any], changes: Changes) -> int:
    """Replace each module for which `made` returns one in its place; returns how many.

    Nothing holds the old module once it is replaced: a list of all modules would keep every old weight until its end.
    `modules` is lazy and visits children after their parent was yielded, so it continues with the new modules.
    """
    replaced = 0
    for module in model.modules():
        for name in [name for name, _ in module.named_children()]:
            new = made(module.get_submodule(name))
            if new is not None:
                changes.replace(module, name, new, restored)
                replaced += 1
    return replaced


def take_conv1ds(model: nn.Module, changes: Changes) -> int:
    """Replace transformers' Conv1D, a linear layer with its weights as (I, O), by linear layers; returns how many.

    They share the weights, which the next operation brings into its own order.
    """
    from transformers.pytorch_utils import Conv1D

    def restored_conv1d(linear: Any) -> nn.Module:
        made = Conv1D(linear.out_features, 1)
        made.nx = linear.in_features
        made.weight, made.bias = nn.Parameter(linear.weight.data.t(), requires_grad=False), linear.bias
        return made

    replaced = 0
    for module in model.modules():
        children: list[tuple[str, Any]] = [*module.named_children()]
        for name, child in children:
            if type(child) is Conv1D:
                changes.replace(module, name, linear_of(child.weight.data.t(), child.bias.data), restored_conv1d)
                replaced += 1
    return replaced


class PatchProduct(nn.Module):
    """A convolution that sees each patch once, as a matrix product.

    On an H200 the library's convolution for Qwen2.5-VL took 1.9 ms for sixteen 448 x 448 images.
    """

    def __init__(self, conv: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.weight = conv.weight
        self.bias = conv.bias
        self.__dict__["_conv"] = conv

    def restored(self) -> nn.Module:
        """Return the convolution."""
        conv: nn.Module = self.__dict__["_conv"]
        return conv

    def forward(self, x: Tensor) -> Tensor:
        """Compute x (P, channels, ...) -> (P, O, 1 ...) if x is one patch wide; otherwise as the convolution."""
        if x.shape[1:] != self.weight.shape[1:]:
            out: Tensor = self.__dict__["_conv"](x)
            return out
        y_PO = nn.functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return y_PO.view(*y_PO.shape, *[1] * (x.dim() - 2))


def replace_patch_convolutions(model: nn.Module, changes: Changes) -> int:
    """Replace convolutions over time and space whose stride equals their kernel; returns how many."""

    def made(child: Any) -> nn.Module | None:
        wanted = type(child) is nn.Conv3d and child.kernel_size == child.stride and child.groups == 1
        return PatchProduct(child) if wanted else None

    return replace_children(model, made, changes)


# 16-bit matrix products need sizes that are multiples of this; for others a library uses slower kernels.
_ALIGNED = 8
_PADDED = 64


def pad_mlps(model: nn.Module, changes: Changes, spared: nn.Module | None = None) -> int:
    """Pad the inner size of gated MLPs with units of zero weight, which change nothing; returns how many were padded.

    Qwen2.5-VL's tower has 3420 inner units. Modules in `spared` keep their sizes, because adapters were made for them.
    """
    padded = 0
    left = set() if spared is None else set(spared.modules())
    for module in model.modules():
        if module in left:
            continue
        found = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        linears = [linear for linear in found if type(linear) is nn.Linear]
        if len(linears) < 3:
            continue
        gate, up, down = linears
        inner = gate.out_features
        if inner % _ALIGNED == 0 or up.out_features != inner or down.in_features != inner:
            continue
        extra = -inner % _PADDED
        for wide in (gate, up):
            _resize(wide, extra, 0)
        _resize(down, 0, extra)
        changes.undo_with(functools.partial(_unpad, module, extra))
        padded += 1
    return padded


def _unpad(mlp: Any, extra: int) -> None:
    for wide in (mlp.gate_proj, mlp.up_proj):
        _resize(wide, -extra, 0)
    _resize(mlp.down_proj, 0, -extra)


def _resize(linear: nn.Linear, outputs: int, inputs: int) -> None:
    """Append this many outputs and inputs of zero weight, or drop the last ones if negative."""
    linear.weight.data = nn.functional.pad(linear.weight.data, (0, inputs, 0, outputs))
    if linear.bias is not None:
        linear.bias.data = nn.functional.pad(linear.bias.data, (0, outputs))
    linear.out_features += outputs
    linear.in_features += inputs
