"""GPTQ checkpoints: numbers of 2, 3, 4 or 8 bits, kept or dequantized while loading.

A linear layer (N outputs, K inputs, G groups of inputs, b bits) is stored as

    qweight (K b / 32, N)    int32: inputs one after the other, the lowest bits first
    qzeros (G, N b / 32)     zero points, outputs one after the other; less one, unless the format is gptq_v2
    scales (G, N)
    g_idx (K,)               each input's group, in any order (act-order); may be absent

and a weight's number is (whole number - zero point) * scale.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.dequantize import DequantizingMethod, LazyWeight
from beheld.quant.grouped import GroupedNumbers, affine
from beheld.quant.integers import dequantized, unpacked
from beheld.quant.kept_groups import KeptGroups, LazyGrouped
from beheld.quant.method import StorageTarget
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import REFETCH, SCALE_TYPES, StoredEntries, check_group_size

METHOD = "gptq"
BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_REMEDY = "Use one in the format 'gptq' or 'gptq_v2' with 2, 3, 4 or 8 bits, or the unquantized checkpoint."


@dataclass(frozen=True)
class GroupedBits:
    """A form that the configuration states.

    Attributes:
        bits: of a weight's number.
        group_size: inputs that share a scale; -1 for all of a layer.
    """

    bits: int
    group_size: int

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> GroupedBits:
        """Read the entries `bits` and `group_size`.

        Raises:
            ModelError: they are not supported.
        """
        bits = stated.get("bits")
        if bits not in BITS:
            raise ModelError(f"GPTQ weights of {bits!r} bits are not supported.", _REMEDY)
        return cls(bits, check_group_size(stated.get("group_size", -1)))

    def __str__(self) -> str:
        return f"{self.bits} bits with the group size {self.group_size}"


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    layout = stated.get("checkpoint_format") or "gptq"
    if layout not in _FORMATS or stated.get("is_marlin_format"):
        raise ModelError(f"GPTQ weights in the format {layout!r} are not supported.", _REMEDY)
    own = GroupedBits.of(stated)
    # Modules by patterns; a pattern that begins with "-:" leaves modules plain.
    changes = [change for pattern, change in (stated.get("dynamic") or {}).items() if not pattern.startswith("-:")]
    forms = (own, *(GroupedBits.of({**stated, **change}) for change in changes))
    read = functools.partial(
        open_weights,
        forms=tuple(dict.fromkeys(forms)),
        zeros_less_one=layout == "gptq",
        ordered=bool(stated.get("desc_act")),
        device=target.device,
    )
    return DequantizingMethod(METHOD, words_of(forms, "GPTQ"), read, KeptGroups(target))


def words_of(forms: Sequence[GroupedBits], name: str) -> str:
    """Return words such as "4-bit weights (GPTQ)"."""
    return f"{' and '.join(str(bits) for bits in sorted({form.bits for form in forms}))}-bit weights ({name})"


def open_weights(
    path: Path, forms: Sequence[GroupedBits], zeros_less_one: bool, ordered: bool, device: str
) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; quantized ones are dequantized on `device` when they are read.

    Args:
        forms: those that the configuration states; a module has the first one that its shapes fit.
        zeros_less_one: whether zero points are stored less one.
        ordered: whether the configuration states act-order, which needs `g_idx`.

    Raises:
        ModelError: entries are missing, or their types, shapes or groups do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    modules = entries.ending(".qweight")
    if not modules:
        raise ModelError("config.json declares GPTQ weights, but none of the weights is GPTQ.", REFETCH)
    for module in modules:
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        if not ordered and names["g_idx"] not in entries.slices:
            del names["g_idx"]
        for name in names.values():
            entries.partner(names["qweight"], name)
            del found[name]
        bits, inputs, group_size = _checked(entries, names, forms)
        parts = {part: entries.slices[name] for part, name in names.items()}
        groups = entries.shape(names["scales"])[0]
        if "g_idx" in names and entries.in_order(names["g_idx"], inputs, groups, group_size):
            # Groups that are runs of inputs need no order, and are dequantized faster.
            del parts["g_idx"]
        known: dict[str, Any] = {"bits": bits, "group_size": group_size, "zeros_less_one": zeros_less_one}
        compute, numbers = functools.partial(_weight, **known), functools.partial(_numbers, **known)
        outputs, name = entries.shape(names["scales"])[1], f"{module}.weight"
        by_word, by_group = Fraction(32, bits), None if groups == 1 else Axis(0, group_size)
        axes = {
            "qweight": (Axis(1), Axis(0, by_word)),
            "qzeros": (Axis(1, by_word), by_group),
            "scales": (Axis(1), by_group),
            # A rank's inputs in an order of their own have groups of other ranks too.
            "g_idx": (None, Axis(0, inputs)),
        }
        stored = StoredAs((outputs, inputs), axes)
        ordered = "g_idx" in parts
        if inputs % group_size or (ordered and not entries.in_equal_groups(names["g_idx"], groups)):
            found[name] = LazyWeight(parts, compute, device, stored)
        else:
            found[name] = LazyGrouped(parts, compute, device, stored, numbers, bits, groups, ordered=ordered)
    entries.refuse_left(found, (".qzeros", ".scales", ".g_idx"), ".qweight")
    return found


def _checked(entries: StoredEntries, names: Mapping[str, str], forms: Sequence[GroupedBits]) -> tuple[int, int, int]:
    """Return a module's bits, its number of inputs and how many of them share a scale."""
    weight, zeros, scales = (entries.shape(names[part]) for part in ("qweight", "qzeros", "scales"))
    entries.require(names["qweight"], ["I32"], weight)
    entries.require(names["qzeros"], ["I32"], zeros)
    entries.require(names["scales"], SCALE_TYPES, scales)
    if len(weight) == 2:
        for form in forms:
            inputs, rest = divmod(weight[0] * 32, form.bits)
            size = inputs if form.group_size == -1 else form.group_size
            # The last group may be shorter.
            groups, outputs = -(-inputs // size), weight[1]
            shapes = scales == [groups, outputs] and zeros == [groups, outputs * form.bits // 32]
            if rest == 0 and outputs * form.bits % 32 == 0 and shapes:
                entries.refuse_zeros(names["scales"])
                return form.bits, inputs, size
    raise entries.refusal(
        names["qweight"],
        f"has the shape {weight}, its scales {scales} and its zero points {zeros}, which do not fit "
        f"{' or '.join(map(str, forms))}",
    )


def _unpacked(qweight: Tensor, qzeros: Tensor, bits: int, zeros_less_one: bool) -> tuple[Tensor, Tensor]:
    """Return numbers (K, N) and zero points (G, N)."""
    numbers_KN, zeros_GN = unpacked(qweight, bits, 0), unpacked(qzeros, bits, 1)
    if zeros_less_one:
        # A zero point has the bits of a weight's number.
        zeros_GN = (zeros_GN + 1) & ((1 << bits) - 1)
    return numbers_KN, zeros_GN


def _weight(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bits: int,
    group_size: int,
    zeros_less_one: bool,
    g_idx: Tensor | None = None,
) -> Tensor:
    numbers_KN, zeros_GN = _unpacked(qweight, qzeros, bits, zeros_less_one)
    inputs = numbers_KN.shape[0]
    if g_idx is None and inputs % group_size:
        g_idx = torch.arange(inputs, device=numbers_KN.device) // group_size
    return dequantized(numbers_KN.t(), zeros_GN.t(), scales.t(), g_idx)


def _numbers(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bits: int,
    group_size: int,
    zeros_less_one: bool,
    g_idx: Tensor | None = None,
) -> GroupedNumbers:
    numbers_KN, zeros_GN = _unpacked(qweight, qzeros, bits, zeros_less_one)
    order_K = None if g_idx is None else g_idx.argsort(stable=True)
    return affine(numbers_KN.t(), zeros_GN.t(), scales.t(), bits, order_K)
