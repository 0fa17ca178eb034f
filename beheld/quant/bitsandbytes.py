"""bitsandbytes checkpoints: weights of 4 bits (NF4, FP4), dequantized while loading, and of 8, kept or dequantized.

A linear layer (N outputs, K inputs) in 4 bits is one row of N K numbers in blocks of B, stored as

    weight                    two codes a byte, the first in the high bits; of any type, as bytes
    weight.quant_map (16,)    the number of each code
    weight.absmax             a scale for each block: float32, or uint8 if scales are quantized themselves, with
    weight.nested_quant_map (256,), weight.nested_absmax
                              the number of each of these, and a scale for each block of them
    weight.quant_state.bitsandbytes__nf4 or __fp4
                              JSON in bytes: the shape [N, K], blocksize, and, of quantized scales, nested_blocksize and
                              nested_offset, which is added to each

and a weight's number is map[code] * scale. In 8 bits it is stored as

    weight (N, K)             int8
    SCB (N,)                  the largest magnitude of each output, which 127 stands for
    weight_format             0: rows, as above
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.dequantize import DequantizingMethod, LazyWeight
from beheld.quant.grouped import GroupedNumbers, affine
from beheld.quant.integers import dequantized
from beheld.quant.kept_groups import KeptGroups, LazyGrouped
from beheld.quant.method import StorageTarget
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import REFETCH, StoredEntries

METHOD = "bitsandbytes"
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_OWNED = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
# The bytes of an element, by the type that codes are stored in.
_STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
_LARGEST = 127.0
# What turns int8 into uint8.
_HALF = 128


@dataclass(frozen=True)
class BlockState:
    """How a weight of 4 bits is stored.

    Attributes:
        shape: N and K.
        blocksize: numbers that share a scale.
        nested_blocksize: scales that share a scale; None if scales are not quantized.
        nested_offset: added to each quantized scale.
    """

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int | None
    nested_offset: float

    @classmethod
    def of(cls, stated: Any) -> BlockState:
        """Return what a `quant_state` says.

        Raises:
            ValueError: it is incomplete, or a size is no positive whole number.
        """
        if not isinstance(stated, Mapping):
            raise ValueError("is no JSON object")
        shape, block, nested = (stated.get(name) for name in ("shape", "blocksize", "nested_blocksize"))
        if not isinstance(shape, list) or len(shape) != 2:
            raise ValueError(f"states the shape {shape!r}; expected two dimensions")
        sizes: list[Any] = [*shape, block, *([] if nested is None else [nested])]
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"states the sizes {sizes}; expected positive whole numbers")
        return cls((sizes[0], sizes[1]), sizes[2], nested, float(stated.get("nested_offset") or 0))


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    four, eight = (bool(stated.get(name) or stated.get(f"_{name}")) for name in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise ModelError("The checkpoint states neither load_in_4bit nor load_in_8bit, or both.", REFETCH)
    if eight:
        return DequantizingMethod(
            METHOD, "8-bit weights (bitsandbytes)", functools.partial(open_eights, device=target.device),
            # Else activations beyond the threshold are not rounded, which int8 products on a GPU do with all.
            KeptGroups(target, rounds=stated.get("llm_int8_threshold") == 0),
        )  # fmt: skip
    kind = str(stated.get("bnb_4bit_quant_type", "fp4")).upper()
    return DequantizingMethod(
        METHOD, f"{kind} weights (bitsandbytes)", functools.partial(open_fours, device=target.device)
    )


def open_fours(path: Path, device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; those of 4 bits are dequantized on `device` when they are read.

    Raises:
        ModelError: entries are missing, or their types, shapes or statements do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    states = [name for name in found if name.endswith(_STATES)]
    if not states:
        raise ModelError("config.json declares 4-bit weights of bitsandbytes, but none of the weights is so.", REFETCH)
    for name in states:
        weight = name.rpartition(".quant_state.")[0]
        entries.partner(name, weight)
        state = _state(entries, name)
        parts = {"codes": weight, "quant_map": f"{weight}.quant_map", "absmax": f"{weight}.absmax"}
        if state.nested_blocksize is not None:
            parts |= {part: f"{weight}.{part}" for part in ("nested_absmax", "nested_quant_map")}
        _check_four(entries, parts, state)
        for part in (*parts.values(), name):
            del found[part]
        slices = {part: entries.slices[entry] for part, entry in parts.items()}
        compute = functools.partial(_of_codes, state=state)
        found[weight] = LazyWeight(slices, compute, device, _stored(entries, weight, state), shaped=True)
    for name in found:
        if name.endswith(_OWNED):
            raise entries.refusal(name, "belongs to no weight of 4 bits")
    return found


def _state(entries: StoredEntries, name: str) -> BlockState:
    entries.require(name, ["U8"], entries.shape(name))
    try:
        return BlockState.of(json.loads(bytes(entries.slices[name][...].flatten().tolist())))
    except (ValueError, TypeError, RecursionError) as error:
        words = str(error) if type(error) is ValueError else "is not valid JSON"
        raise entries.refusal(name, words) from error


def _check_four(entries: StoredEntries, parts: Mapping[str, str], state: BlockState) -> None:
    codes = parts["codes"]
    for name in parts.values():
        entries.partner(codes, name)
    numbers = state.shape[0] * state.shape[1]
    width = _STORAGE.get(entries.slices[codes].get_dtype(), 0)
    size = -(-numbers // 2)
    entries.require(
        codes, [*_STORAGE], *([size // width, 1], [1, size // width]) if width and size % width == 0 else ()
    )
    entries.require(parts["quant_map"], ["F32"], [16])
    blocks = -(-numbers // state.blocksize)
    if state.nested_blocksize is None:
        entries.require(parts["absmax"], ["F32"], [blocks])
        entries.refuse_zeros(parts["absmax"])
        return
    entries.require(parts["absmax"], ["U8"], [blocks])
    entries.require(parts["nested_absmax"], ["F32"], [-(-blocks // state.nested_blocksize)])
    entries.require(parts["nested_quant_map"], ["F32"], [256])


def _stored(entries: StoredEntries, codes: str, state: BlockState) -> StoredAs:
    """Return how entries hold a weight's outputs; numbers lie one output after the other, and blocks go across them."""
    inputs = state.shape[1]
    shape = entries.shape(codes)
    width = _STORAGE[entries.slices[codes].get_dtype()]
    uncut = Axis(0, inputs)
    axes = {
        "codes": (Axis(0 if shape[1] == 1 else 1, Fraction(2 * width, inputs)), uncut),
        "absmax": (Axis(0, Fraction(state.blocksize, inputs)), uncut),
        "nested_absmax": (Axis(0, Fraction(state.blocksize * (state.nested_blocksize or 1), inputs)), uncut),
        "quant_map": (None, None),
        "nested_quant_map": (None, None),
    }
    return StoredAs(state.shape, axes)


def _of_codes(
    codes: Tensor,
    quant_map: Tensor,
    absmax: Tensor,
    state: BlockState,
    shape: tuple[int, int],
    nested_absmax: Tensor | None = None,
    nested_quant_map: Tensor | None = None,
) -> Tensor:
    """Return the numbers of a weight in float32, (N, K)."""
    scales = absmax
    if nested_absmax is not None and nested_quant_map is not None:
        assert state.nested_blocksize is not None
        scales = nested_quant_map[absmax.int()]
        scales *= nested_absmax.repeat_interleave(state.nested_blocksize)[: len(scales)]
        scales += state.nested_offset
    outputs, inputs = shape
    packed = codes.contiguous().view(-1).view(torch.uint8)
    numbers = torch.stack((quant_map[(packed >> 4).int()], quant_map[(packed & 15).int()]), -1).view(-1)
    numbers = numbers[: outputs * inputs]
    whole = len(numbers) // state.blocksize
    # The last block may be a part of one.
    numbers[: whole * state.blocksize].view(whole, state.blocksize).mul_(scales[:whole, None])
    numbers[whole * state.blocksize :] *= scales[-1]
    return numbers.view(outputs, inputs)


def open_eights(path: Path, device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; those of 8 bits are dequantized on `device` when they are read.

    Raises:
        ModelError: entries are missing, or their types or shapes do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    modules = entries.ending(".SCB")
    if not modules:
        raise ModelError("config.json declares 8-bit weights of bitsandbytes, but none of the weights is so.", REFETCH)
    made = set[str]()
    for module in modules:
        weight, scale, form = (f"{module}.{part}" for part in ("weight", "SCB", "weight_format"))
        shape = entries.shape(entries.partner(scale, weight))
        if len(shape) != 2:
            raise entries.refusal(weight, f"has the shape {shape}; expected two dimensions")
        entries.require(weight, ["I8"], shape)
        entries.require(scale, ["F32"], [shape[0]])
        entries.refuse_zeros(scale)
        if form in entries.slices:
            entries.require(form, ["U8"], [], [1])
            if int(entries.slices[form][...]) != 0:
                raise entries.refusal(weight, "is stored in tiles", "Use a checkpoint saved by a current bitsandbytes.")
            del found[form]
        del found[scale]
        parts = {"weight": entries.slices[weight], "scale": entries.slices[scale]}
        made.add(weight)
        axes = {"weight": (Axis(0), Axis(1)), "scale": (Axis(0), None)}
        stored = StoredAs((shape[0], shape[1]), axes)
        found[weight] = LazyGrouped(parts, _of_eights, device, stored, _kept_eights, 8, 1, by_output=True)
    for name in found:
        if name not in made and entries.slices[name].get_dtype() == "I8":
            raise entries.refusal(name, f"has no {name.removesuffix('weight') + 'SCB'!r}")
    return found


def _of_eights(weight: Tensor, scale: Tensor) -> Tensor:
    return dequantized(weight, 0, (scale / _LARGEST).unsqueeze(1), None)


def _kept_eights(weight: Tensor, scale: Tensor) -> GroupedNumbers:
    # From -128 to 127; the highest bit turned over adds 128.
    numbers_NK = weight.contiguous().view(torch.uint8) ^ _HALF
    return affine(numbers_NK, _HALF, (scale / _LARGEST).unsqueeze(1), 8)
