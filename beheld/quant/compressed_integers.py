"""Weights of compressed-tensors in whole numbers of 4 or 8 bits, kept or dequantized while loading.

A linear layer (N outputs, K inputs, G groups of inputs, b bits) is stored as

    weight             (N, K)              int8, or instead
    weight_packed      (N, K b / 32)       int32, rounded up: inputs one after the other, the lowest bits first, each
                                           with half of its range added
    weight_shape       (2,)                N and K, if packed
    weight_scale       (N, G)              G is 1 by channel; one number by tensor
    weight_zero_point  as the scale        int8; packed along outputs if the weight is packed; none if symmetric
    weight_g_idx       (K,)                each input's group, in any order (act-order); may be absent

and a weight's number is (whole number - zero point) * scale.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from beheld.quant.compressed_schemes import CompressedScheme
from beheld.quant.dequantize import LazyWeight
from beheld.quant.grouped import GroupedNumbers, affine
from beheld.quant.integers import dequantized, unpacked
from beheld.quant.kept_groups import LazyGrouped
from beheld.quant.stored_as import Axis, StoredAs, group_axis
from beheld.quant.stored_entries import SCALE_TYPES, StoredEntries

PACKED = ".weight_packed"
_INT8 = "I8"
# What turns int8 into uint8.
_HALF = 128


def are_integers(entries: StoredEntries, name: str) -> bool:
    """Return whether an entry holds a weight's whole numbers."""
    return name.endswith(PACKED) or (name.endswith(".weight") and entries.slices[name].get_dtype() == _INT8)


def take(
    entries: StoredEntries, name: str, schemes: Sequence[CompressedScheme], device: str, left: dict[str, Any]
) -> None:
    """Replace the entries of one layer in `left`, which holds entries by name, by its weight.

    Args:
        name: the entry that holds whole numbers.
        schemes: those that the configuration states; the layer has the first one that its shapes fit.

    Raises:
        ModelError: entries are missing, or their types, shapes or groups do not fit.
    """
    packed = name.endswith(PACKED)
    module = name.removesuffix(PACKED).removesuffix(".weight")
    scale = entries.partner(name, f"{module}.weight_scale")
    zero, order, said = (f"{module}.weight_{part}" for part in ("zero_point", "g_idx", "shape"))
    shape = _shape(entries, name, said) if packed else entries.shape(name)
    entries.require(scale, SCALE_TYPES, entries.shape(scale))
    fitting = [
        each
        for each in schemes
        if each.packed == packed and each.type == "int" and _fits(entries, name, scale, shape, each)
    ]
    if not fitting:
        raise entries.refusal(
            name,
            f"has the shape {entries.shape(name)} for a weight {shape}, and its scales {entries.shape(scale)}, which "
            f"fit none of the schemes that config.json states: {'; '.join(map(str, schemes))}",
        )
    entries.refuse_zeros(scale)
    scheme = fitting[0]
    parts = {"numbers": entries.slices[name], "scale": entries.slices[scale]}
    if not scheme.symmetric:
        entries.partner(name, zero)
    if zero in entries.slices:
        _check_zeros(entries, zero, entries.shape(scale), shape, scheme)
        parts["zeros"] = entries.slices[zero]
    if order in entries.slices and scheme.strategy == "group":
        size = scheme.sizes[0]
        if not entries.in_order(order, shape[1], shape[1] // size, size):
            parts["order"] = entries.slices[order]
    for each in (name, scale, zero, order, said):
        left.pop(each, None)
    compute = functools.partial(_weight, scheme=scheme)
    groups = shape[1] // scheme.sizes[0] if scheme.strategy == "group" else 1
    stored, ordered = _stored((shape[0], shape[1]), groups, scheme), "order" in parts
    if ordered and not entries.in_equal_groups(order, groups):
        left[f"{module}.weight"] = LazyWeight(parts, compute, device, stored, shaped=True)
        return
    numbers = functools.partial(_numbers, scheme=scheme)
    by_output = scheme.bits == 8 and groups == 1 and "zeros" not in parts and not ordered
    left[f"{module}.weight"] = LazyGrouped(
        parts, compute, device, stored, numbers, scheme.bits, groups, ordered=ordered, by_output=by_output, shaped=True
    )


def _stored(shape: tuple[int, int], groups: int, scheme: CompressedScheme) -> StoredAs:
    """Return how a weight's entries hold its outputs and inputs."""
    by_word = Fraction(32, scheme.bits) if scheme.packed else 1
    axes: dict[str, tuple[Axis | None, Axis | None]] = {
        "numbers": (Axis(0), Axis(1, by_word)),
        # A rank's inputs in an order of their own have groups of other ranks too.
        "order": (None, Axis(0, shape[1])),
    }
    for part in ("scale", "zeros"):
        by_output = Axis(0, by_word if part == "zeros" and _packs_zeros(scheme) else 1)
        axes[part] = None if scheme.strategy == "tensor" else by_output, group_axis(1, shape[1], groups)
    return StoredAs(shape, axes)


def _shape(entries: StoredEntries, name: str, said: str) -> list[int]:
    """Return the shape of a packed weight, which is read."""
    entries.require(entries.partner(name, said), ["I32", "I64"], [2])
    return [int(size) for size in entries.slices[said][...]]


def _fits(entries: StoredEntries, name: str, scale: str, shape: Sequence[int], scheme: CompressedScheme) -> bool:
    if len(shape) != 2 or min(shape) < 1:
        return False
    outputs, inputs = shape
    kind = entries.slices[name].get_dtype()
    stored = [outputs, -(-inputs * scheme.bits // 32)] if scheme.packed else [outputs, inputs]
    if kind != ("I32" if scheme.packed else _INT8) or entries.shape(name) != stored:
        return False
    if scheme.strategy == "tensor":
        return entries.shape(scale) in ([], [1])
    if scheme.strategy == "channel":
        return entries.shape(scale) in ([outputs, 1], [outputs])
    size = scheme.sizes[0]
    return inputs % size == 0 and entries.shape(scale) == [outputs, inputs // size]


def _check_zeros(
    entries: StoredEntries, zero: str, scales: Sequence[int], shape: Sequence[int], scheme: CompressedScheme
) -> None:
    if _packs_zeros(scheme):
        entries.require(zero, ["I32"], [-(-shape[0] * scheme.bits // 32), *(scales[1:] or [1])])
    else:
        entries.require(zero, [_INT8], scales)


def _packs_zeros(scheme: CompressedScheme) -> bool:
    return scheme.packed and not scheme.symmetric and scheme.strategy != "tensor"


def _weight(
    numbers: Tensor,
    scale: Tensor,
    scheme: CompressedScheme,
    shape: tuple[int, int],
    zeros: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    numbers_NK, zeros_NG, scales_NG = _parted(numbers, scale, scheme, shape, zeros)
    return dequantized(numbers_NK, zeros_NG, scales_NG, order)


def _numbers(
    numbers: Tensor,
    scale: Tensor,
    scheme: CompressedScheme,
    shape: tuple[int, int],
    zeros: Tensor | None = None,
    order: Tensor | None = None,
) -> GroupedNumbers:
    numbers_NK, zeros_NG, scales_NG = _parted(numbers, scale, scheme, shape, zeros)
    if not scheme.packed:
        # From -128 to 127; the highest bit turned over adds 128.
        numbers_NK, zeros_NG = numbers_NK.contiguous().view(torch.uint8) ^ _HALF, zeros_NG + _HALF
    return affine(numbers_NK, zeros_NG, scales_NG, scheme.bits, None if order is None else order.argsort(stable=True))


def _parted(
    numbers: Tensor, scale: Tensor, scheme: CompressedScheme, shape: tuple[int, int], zeros: Tensor | None
) -> tuple[Tensor, Tensor | int, Tensor]:
    """Return whole numbers (N, K), zero points (N, G) or one for all, and scales (N, G)."""
    outputs, inputs = shape
    half = 0
    if scheme.packed:
        # Words may be longer than rows.
        numbers, half = unpacked(numbers, scheme.bits, 1)[:, :inputs], 1 << (scheme.bits - 1)
    scales_NG = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    scales_NG = scales_NG.expand(outputs, -1)
    if zeros is None:
        return numbers, half, scales_NG
    if _packs_zeros(scheme):
        # Half of the range is added to these too.
        return numbers, unpacked(zeros, scheme.bits, 0)[:outputs].int(), scales_NG
    return numbers, (zeros.reshape(-1, 1) if zeros.dim() < 2 else zeros).expand(outputs, -1).int() + half, scales_NG
