"""torchao checkpoints as transformers saves them to safetensors: whole numbers kept or dequantized, FP8 dequantized.

A weight NAME.weight (N outputs, K inputs) is stored as entries NAME._weight_PART, and the file's metadata say, for
NAME.weight, its type, a class of torchao, and the `block_size` that shares a scale:

    Int8Tensor, IntxUnpackedToInt8Tensor
        qdata (N, K)            int8; of `target_dtype`, which has fewer bits, if that is stated
        scale, zero_point       one for each block, in as many dimensions; a number is (qdata - zero_point) * scale
    Int4Tensor
        qdata (N, K / 2)        two signed numbers of four bits a byte, the first in the low bits
        scale, zero_point (G, N) a number is qdata * scale + zero_point
    Float8Tensor
        qdata (N, K)            FP8 (E4M3)
        scale                   one for each block; a number is qdata * scale
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.dequantize import DequantizingMethod, LazyWeight
from beheld.quant.grouped import GroupedNumbers, affine
from beheld.quant.integers import dequantized
from beheld.quant.kept_blocks import scaled
from beheld.quant.kept_groups import KeptGroups, LazyGrouped
from beheld.quant.method import StorageTarget
from beheld.quant.stored_as import Axis, StoredAs, group_axis
from beheld.quant.stored_entries import SCALE_TYPES, StoredEntries

METHOD = "torchao"
_PREFIX = "._weight_"
_DATA = f"{_PREFIX}qdata"
_REMEDY = "Use one in int8, int4 (plain) or FP8, or the unquantized checkpoint."
# Half of the range of a number of 8 bits, and of 4.
_HALF_8, _HALF_4 = 128, 8


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    read = functools.partial(open_weights, device=target.device)
    return DequantizingMethod(METHOD, "weights of torchao", read, KeptGroups(target))


def open_weights(path: Path, device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; quantized ones are dequantized on `device` when they are read.

    Raises:
        ModelError: a weight is of a type that is not supported, or entries are missing or do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    modules = entries.ending(_DATA)
    if not modules:
        raise ModelError(
            "config.json declares weights of torchao, but none in the safetensors files is so.",
            "Save it anew with current versions of torchao and transformers, or use the unquantized one.",
        )
    for module in modules:
        weight = _Weight(entries, module)
        for name in weight.names.values():
            del found[name]
        found[f"{module}.weight"] = _OPEN[weight.type](weight, device)
    for name in found:
        if _PREFIX in name:
            raise entries.refusal(name, f"has no {name.rpartition(_PREFIX)[0] + _DATA!r}")
    return found


class _Weight:
    """What the files say of one weight.

    Attributes:
        type: torchao's class.
        names: of the entries, by part.
        fields: the class's other attributes.
        block: the numbers of each dimension that share a scale.
    """

    def __init__(self, entries: StoredEntries, module: str) -> None:
        data = module + _DATA
        text = entries.metadata.get(f"{module}.weight")
        try:
            stated = json.loads(text or "")
            self.type, self.fields = str(stated["_type"]), dict(stated["_data"])
            parts = list(stated["_tensor_data_names"])
            self.block = [int(size) for size in self.fields["block_size"]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise entries.refusal(data, "is not described by the metadata of its file") from error
        if self.type not in _OPEN:
            raise entries.refusal(data, f"is an {self.type}, which is not supported", _REMEDY)
        if self.fields.get("act_pre_scale") is not None or "act_pre_scale" in parts:
            raise entries.refusal(data, "has scales of activations, which are not supported", _REMEDY)
        self.entries = entries
        self.names = {part: entries.partner(data, f"{module}{_PREFIX}{part}") for part in parts}
        if not {"qdata", "scale"} <= self.names.keys() <= {"qdata", "scale", "zero_point"}:
            raise entries.refusal(data, f"has the parts {parts}; expected qdata, scale and zero_point")
        if len(self.block) != 2 or min(self.block) < 1:
            raise self.refusal(f"states the block_size {self.block}; expected two sizes")

    @property
    def parts(self) -> dict[str, Any]:
        """The entries, unread."""
        return {part: self.entries.slices[name] for part, name in self.names.items()}

    def require(self, part: str, types: tuple[str, ...], *shapes: list[int]) -> None:
        """Check a part; see StoredEntries.require and refuse_zeros."""
        self.entries.require(self.entries.partner(self.names["qdata"], self.names.get(part, part)), types, *shapes)
        if part == "scale":
            self.entries.refuse_zeros(self.names[part])

    def shape(self) -> list[int]:
        """Return the shape of `qdata`, which has two dimensions."""
        shape = self.entries.shape(self.names["qdata"])
        if len(shape) != 2:
            raise self.refusal(f"has the shape {shape}; expected two dimensions")
        return shape

    def blocks(self, shape: list[int]) -> list[int]:
        """Return the number of blocks in each dimension of a weight."""
        if any(size % block for size, block in zip(shape, self.block, strict=True)):
            raise self.refusal(f"has the shape {shape}, which blocks of {self.block} do not divide")
        return [size // block for size, block in zip(shape, self.block, strict=True)]

    def refusal(self, words: str) -> ModelError:
        """Return an error about the weight."""
        return self.entries.refusal(self.names["qdata"], words)


def _integers(weight: _Weight, device: str) -> LazyWeight:
    shape = weight.shape()
    bits = _bits(weight)
    weight.require("qdata", ("I8",), shape)
    blocks = weight.blocks(shape)
    # A block is a part of one output, or the whole.
    if blocks[0] != shape[0] and blocks != [1, 1]:
        raise weight.refusal(f"has blocks of {weight.block}, which are not supported")
    one = [[], [1]] if blocks == [1, 1] else []
    weight.require("scale", SCALE_TYPES, blocks, *one)
    if "zero_point" in weight.names:
        weight.require("zero_point", ("I8", "I32", "I64", *SCALE_TYPES), blocks, *one)
    numbers = functools.partial(_kept, bits=bits)
    own = None if blocks == [1, 1] else Axis(0), group_axis(1, shape[1], blocks[1])
    axes = {"qdata": (Axis(0), Axis(1)), "scale": own, "zero_point": own}
    stored = StoredAs((shape[0], shape[1]), axes)
    return LazyGrouped(weight.parts, _whole, device, stored, numbers, bits, blocks[1])


def _bits(weight: _Weight) -> int:
    """Return the bits of the numbers: those of `target_dtype`, such as int4, or eight."""
    target = weight.fields.get("target_dtype")
    if target is None:
        return 8
    found = re.fullmatch(r"int([1-8])", str(target.get("_data") if isinstance(target, Mapping) else target))
    if found is None:
        raise weight.refusal(f"states the target_dtype {target!r}; expected int1 to int8")
    return int(found[1])


def _by_group(qdata: Tensor, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """Return scales (N, G) and zero points (N, G), or 0."""
    scales_NG = (scale.reshape(1, 1) if scale.numel() == 1 else scale).expand(len(qdata), -1)
    if zero_point is None:
        return scales_NG, 0
    return scales_NG, (zero_point.reshape(1, 1) if zero_point.numel() == 1 else zero_point).expand(len(qdata), -1)


def _whole(qdata: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    scales_NG, zeros_NG = _by_group(qdata, scale, zero_point)
    return dequantized(qdata, zeros_NG, scales_NG, None)


def _kept(qdata: Tensor, scale: Tensor, bits: int, zero_point: Tensor | None = None) -> GroupedNumbers:
    scales_NG, zeros_NG = _by_group(qdata, scale, zero_point)
    half = 1 << (bits - 1)
    numbers_NK = (qdata.to(torch.int16) + half).to(torch.uint8)
    zeros_NG = zeros_NG.float() + half if isinstance(zeros_NG, Tensor) else half
    return affine(numbers_NK, zeros_NG, scales_NG, bits)


def _nibbles(weight: _Weight, device: str) -> LazyWeight:
    outputs, packed = weight.shape()
    shape = [outputs, 2 * packed]
    weight.require("qdata", ("I8", "U8"), [outputs, packed])
    blocks = weight.blocks(shape)
    if blocks[0] != outputs:
        raise weight.refusal(f"has blocks of {weight.block}, which are not supported")
    for part in ("scale", "zero_point"):
        weight.require(part, SCALE_TYPES, [blocks[1], outputs])
    own = Axis(1), group_axis(0, shape[1], blocks[1])
    axes = {"qdata": (Axis(0), Axis(1, 2)), "scale": own, "zero_point": own}
    stored = StoredAs((outputs, shape[1]), axes)
    return LazyGrouped(weight.parts, _of_nibbles, device, stored, _kept_nibbles, 4, blocks[1])


def _unsigned(qdata: Tensor) -> Tensor:
    """Return numbers (N, K) from 0 to 15: the signed ones plus 8, which turns the highest of four bits over."""
    packed = qdata.contiguous().view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1) ^ _HALF_4


def _zeros(scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the whole numbers' zero points (N, G), which are fractions."""
    scale = scale.float()
    return (_HALF_4 - torch.where(scale == 0, 0.0, zero_point.float() / scale)).t()


def _of_nibbles(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    numbers_NK = (_unsigned(qdata).float() - _HALF_4).unflatten(1, (len(scale), -1))
    return numbers_NK.mul_(scale.float().t().unsqueeze(-1)).add_(zero_point.float().t().unsqueeze(-1)).flatten(1)


def _kept_nibbles(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> GroupedNumbers:
    return affine(_unsigned(qdata), _zeros(scale, zero_point), scale.t(), 4)


def _eights(weight: _Weight, device: str) -> LazyWeight:
    shape = weight.shape()
    weight.require("qdata", ("F8_E4M3",), shape)
    blocks = weight.blocks(shape)
    weight.require("scale", SCALE_TYPES, blocks, *([[], [1]] if blocks == [1, 1] else []))
    block = None if blocks == [1, 1] else (weight.block[0], weight.block[1])
    own = (None, None) if block is None else (Axis(0, block[0]), group_axis(1, shape[1], blocks[1]))
    stored = StoredAs((shape[0], shape[1]), {"qdata": (Axis(0), Axis(1)), "scale": own})
    return LazyWeight(weight.parts, functools.partial(_of_eights, block=block), device, stored)


def _of_eights(qdata: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    if block is None or block[0] > 1:
        return scaled(qdata, scale, block)
    numbers = qdata.float()
    numbers.unflatten(1, (scale.shape[1], -1)).mul_(scale.unsqueeze(-1))
    return numbers


# torchao's class -> what opens a weight of it.
_OPEN: dict[str, Callable[[_Weight, str], LazyWeight]] = {
    "Float8Tensor": _eights,
    "Int4Tensor": _nibbles,
    "Int8Tensor": _integers,
    "IntxUnpackedToInt8Tensor": _integers,
}
