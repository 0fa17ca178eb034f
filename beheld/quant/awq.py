"""AWQ checkpoints in the GEMM layout: numbers of four bits, kept or dequantized while loading.

A linear layer (N outputs, K inputs, G groups of inputs) is stored as

    qweight (K, N / 8)    int32: eight outputs a word, the lowest bits first, in the order 0 2 4 6 1 3 5 7
    qzeros (G, N / 8)     zero points in the same order
    scales (G, N)

and a weight's number is (whole number - zero point) * scale.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.dequantize import DequantizingMethod
from beheld.quant.grouped import GroupedNumbers, affine
from beheld.quant.integers import dequantized, reordered, unpacked
from beheld.quant.kept_groups import KeptGroups, LazyGrouped
from beheld.quant.method import StorageTarget
from beheld.quant.stored_as import Axis, StoredAs, group_axis
from beheld.quant.stored_entries import REFETCH, SCALE_TYPES, StoredEntries, check_group_size

METHOD = "awq"
BITS = 4
_REMEDY = "Use one in AWQ's GEMM layout with 4 bits, or the unquantized checkpoint."
PER_WORD = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    bits = stated.get("bits", stated.get("w_bit", BITS))
    if bits != BITS:
        raise ModelError(f"AWQ weights of {bits!r} bits are not supported.", _REMEDY)
    layout = str(stated.get("version") or "gemm").lower()
    if layout != "gemm":
        raise ModelError(f"AWQ weights in the layout {layout!r} are not supported.", _REMEDY)
    if stated.get("zero_point", True) is not True:
        raise ModelError("AWQ weights without zero points are not supported.", _REMEDY)
    size = check_group_size(stated.get("group_size", stated.get("q_group_size", 128)))
    read = functools.partial(open_weights, group_sizes=(size,), device=target.device)
    return DequantizingMethod(METHOD, "4-bit weights (AWQ)", read, KeptGroups(target))


def open_weights(path: Path, group_sizes: Sequence[int], device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; quantized ones are dequantized on `device` when they are read.

    Args:
        group_sizes: the sizes that the configuration states; -1 for all inputs of a layer.

    Raises:
        ModelError: entries are missing, or their types or shapes do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    modules = entries.ending(".qweight")
    if not modules:
        raise ModelError("config.json declares AWQ weights, but none of the weights is AWQ.", REFETCH)
    for module in modules:
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        for name in names.values():
            entries.partner(names["qweight"], name)
            del found[name]
        _check(entries, names, group_sizes)
        parts = {part: entries.slices[name] for part, name in names.items()}
        inputs, words = entries.shape(names["qweight"])
        groups = entries.shape(names["scales"])[0]
        by_group = group_axis(0, inputs, groups)
        axes = {
            "qweight": (Axis(1, PER_WORD), Axis(0)),
            "qzeros": (Axis(1, PER_WORD), by_group),
            "scales": (Axis(1), by_group),
        }
        stored = StoredAs((words * PER_WORD, inputs), axes)
        found[f"{module}.weight"] = LazyGrouped(parts, _weight, device, stored, _numbers, BITS, groups)
    entries.refuse_left(found, (".qzeros", ".scales"), ".qweight")
    return found


def _check(entries: StoredEntries, names: Mapping[str, str], group_sizes: Sequence[int]) -> None:
    shape = entries.shape(names["qweight"])
    if len(shape) != 2:
        raise entries.refusal(names["qweight"], f"has the shape {shape}; expected two dimensions")
    inputs, words = shape
    entries.require(names["qweight"], ["I32"], shape)
    sizes = [inputs if size == -1 else size for size in group_sizes]
    fitting = [size for size in sizes if inputs % size == 0]
    if not fitting:
        said = " or ".join(map(str, sizes))
        raise entries.refusal(names["qweight"], f"has {inputs} inputs, which are no multiple of the group size {said}")
    entries.require(names["scales"], SCALE_TYPES, *([inputs // size, words * PER_WORD] for size in fitting))
    entries.require(names["qzeros"], ["I32"], [entries.shape(names["scales"])[0], words])
    entries.refuse_zeros(names["scales"])


def _unpacked(qweight: Tensor, qzeros: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers (K, N) and zero points (G, N)."""
    numbers_KN, zeros_GN = (reordered(unpacked(words, BITS, 1), ORDER) for words in (qweight, qzeros))
    return numbers_KN, zeros_GN


def _weight(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    numbers_KN, zeros_GN = _unpacked(qweight, qzeros)
    return dequantized(numbers_KN.t(), zeros_GN.t(), scales.t(), None)


def _numbers(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupedNumbers:
    numbers_KN, zeros_GN = _unpacked(qweight, qzeros)
    return affine(numbers_KN.t(), zeros_GN.t(), scales.t(), BITS)
