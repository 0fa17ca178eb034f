"""Checkpoints in the compressed-tensors format: FP8 or whole numbers multiplied as stored, or dequantized; NVFP4.

Each FP8 weight has a scale: one number per output channel, or one for the whole weight, or one for each block. A device
that multiplies FP8 keeps the weights of a checkpoint that has the first two alone (row_bytes.py, float8.py) or blocks
alone (kept_blocks.py). Elsewhere a weight is multiplied by its scale when transformers' loader reads it, before the
loader merges or renames anything, so scales need no renaming. Whole numbers (compressed_integers.py) are kept where
products of them are (kept_groups.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beheld.core.errors import ModelError
from beheld.platform.registry import platform_of
from beheld.quant import cache_scales, compressed_fp4, compressed_integers, row_bytes
from beheld.quant.compressed_schemes import FP8_ROWS, METHOD, CompressedScheme, schemes_of
from beheld.quant.dequantize import AS_STORED, LazyWeight, are_kept, without_quantization
from beheld.quant.float8 import ALIGNED, FP8, Float8Experts, Float8Linear
from beheld.quant.fp8 import check_scale
from beheld.quant.kept_blocks import KeptBlocks, lazy_blocks, log_kept
from beheld.quant.kept_groups import KeptGroups
from beheld.quant.linear import StoredExperts, StoredLinear
from beheld.quant.method import Replace, StorageTarget, TextOf
from beheld.quant.row_bytes import LoadedRows
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import SCALE_TYPES, StoredEntries, entry_files
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_FP8 = "F8_E4M3"
_SCALE = "_scale"
_EXACT = "the checkpoint's activations are not FP8"
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale")
_PARTS = tuple(f".weight_{part}" for part in ("scale", "zero_point", "shape", "g_idx", "global_scale"))


def make(stated: Mapping[str, Any], target: StorageTarget) -> CompressedTensors:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    return CompressedTensors(stated, target)


class CompressedTensors:
    """See QuantMethod.

    Attributes:
        objection: why weights are not kept as stored, in words; None if they are kept.
    """

    name = METHOD

    def __init__(self, stated: Mapping[str, Any], target: StorageTarget) -> None:
        self._device, self._dtype = target.device, target.dtype
        self._schemes = schemes_of(stated)
        self._has_cache = cache_scales.are_stated(stated)
        bits = sorted({scheme.word for scheme in self._schemes})
        self._words = f"{' and '.join(bits)} weights"
        self.converted = f"its {self._words} dequantized"
        self.objection = objection(stated, self._schemes, target.device, target.dtype)
        blocks = KeptBlocks(target, None if rounds_activations(stated) else _EXACT)
        in_blocks = all(scheme.type == "float" and scheme.strategy == "block" for scheme in self._schemes)
        self._blocks = blocks if in_blocks and blocks.objection is None else None
        self._groups = KeptGroups(target, rounds=rounds_to_bytes(stated))
        integers = any(scheme.type == "int" for scheme in self._schemes)
        self._keeps_groups = self.objection is not None and integers and self._groups.objection is None
        # Why whole numbers are dequantized is of interest where there are any.
        self._why = self._groups.objection if integers else blocks.objection if in_blocks else self.objection

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized on the device unless `loading` replaces them."""
        found = open_weights(path, self._device, self._schemes)
        return cache_scales.left_out(found) if self._has_cache else found

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return a class with room for rows that carry their scales, if weights are kept."""
        if self.objection is None:
            logger.info("FP8 weights stay as they are; products are of FP8 numbers, activations rounded by token.")
            return row_bytes.keeping(model_class, weights, self)
        if self._blocks is not None:
            return self._blocks.loading(model_class, weights)
        if self._keeps_groups:
            return self._groups.loading(model_class, weights)
        logger.warning(
            "%s are dequantized as they are loaded, because %s: the model takes the memory of an unquantized one, and "
            "activations are not rounded.",
            self._words,
            self._why,
        )
        return model_class

    def kept_as(self, parameter: Tensor, weights: Sequence[Any]) -> str | None:
        """Return that they are as stored, if they are kept."""
        form = self if self.objection is None else self._blocks or (self._groups if self._keeps_groups else None)
        return AS_STORED if form is not None and are_kept(form.takes, parameter, weights) else None

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Separate rows from their scales."""
        if self._blocks is not None:
            self._blocks.settle(model, model_class, replace)
        if self._keeps_groups:
            self._groups.settle(model, model_class, replace)
        if self.objection is not None:
            return
        log_kept(row_bytes.settle(model, model_class, self, replace))

    def stored_bytes(
        self, path: Path, model: Any, text_of: TextOf, weights: Mapping[str, Any] | None = None
    ) -> int | None:
        """Return the stored size; layers that are not FP8 take two bytes per number in the checkpoint and in memory."""
        kept = self._blocks or (self._groups if self._keeps_groups else None)
        if kept is not None:
            return kept.stored_bytes((self.weights(path) or {}) if weights is None else weights, model)
        if weights is None or self.objection is not None:
            return stored_bytes(path) if self.objection is None else None
        total = sum(parameter.nbytes for parameter in model.parameters())
        shapes = [each.shape for each in weights.values() if isinstance(each, Dequantized)]
        rows = [shape for shape in shapes if all(size % ALIGNED == 0 for size in shape)]
        return total - sum(math.prod(shape) * (self._dtype.itemsize - 1) - 4 * shape[0] for shape in rows)

    # ------------------------------------------------------------------ rows, see row_bytes.RowForm

    def layout(self, weight: Any, inputs: int) -> Sequence[tuple[torch.dtype, int]]:
        """Return the fields of a row: its numbers, then its scale."""
        return (FP8, inputs), (torch.float32, 1)

    def takes(self, parameter: Tensor, weights: Sequence[Any]) -> bool:
        """Return whether both sizes are multiples of what FP8 products require."""
        return all(size % ALIGNED == 0 for size in parameter.shape[-2:])

    def linear(self, rows: LoadedRows, bias_N: Tensor | None) -> StoredLinear:
        """Make a linear layer that multiplies FP8."""
        rows_NK, scale_N1 = rows.fields
        return Float8Linear(rows_NK, scale_N1.squeeze(-1), bias_N, self._dtype)

    def experts(self, shell: nn.Module, gate_up: LoadedRows, down: LoadedRows) -> StoredExperts:
        """Make experts that multiply FP8."""
        both = [(rows, scale.squeeze(-1)) for rows, scale in (gate_up.fields, down.fields)]
        return Float8Experts(shell, both[0], both[1], self._dtype)


class Dequantized(LazyWeight):
    """A weight of FP8 numbers with a scale for each row, or for all."""

    def __init__(self, weight: Any, scale: Any, device: str) -> None:
        shape = weight.get_shape()
        has_rows = len(scale.get_shape()) == 2
        axes = {"weight": (Axis(0), Axis(1)), "scale": (Axis(0) if has_rows else None, None)}
        stored = StoredAs(tuple(shape), axes) if len(shape) == 2 else None
        super().__init__({"weight": weight, "scale": scale}, _widened, device, stored)

    @property
    def shape(self) -> list[int]:
        """Return the weight's shape."""
        return list(self._parts["weight"].get_shape())

    def fields(self) -> Sequence[Tensor]:
        """FP8 numbers (N, K) and a scale for each row, (N, 1), on the CPU."""
        weight_NK: Tensor = self._parts["weight"][...]
        scale: Tensor = self._parts["scale"][...]
        return weight_NK, scale.float().reshape(-1, 1).expand(weight_NK.shape[0], 1)


def _widened(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers in float32, of FP8 numbers (N, K) and scales (N, 1), (1,) or ()."""
    # One byte per number becomes four bytes on the device.
    return weight.float().mul_(scale.float().reshape(-1, 1))


def objection(
    stated: Mapping[str, Any], schemes: Sequence[CompressedScheme], device: str, dtype: torch.dtype
) -> str | None:
    """Return why weights cannot stay as they are, in words; None if they can."""
    if any(scheme.is_nvfp4 for scheme in schemes):
        return "products of NVFP4 numbers are not built"
    if not all(scheme.has_rows for scheme in schemes):
        return "FP8 weights are multiplied as stored if all have a scale for each channel or weight, or all have blocks"
    if not platform_of(device).fp8_products:
        return "this device has no products of FP8 numbers"
    if not env.FP8():
        return "BEHELD_FP8=0"
    if dtype != torch.bfloat16:
        return f"products of FP8 numbers are given in bfloat16, and {str(dtype).removeprefix('torch.')} was asked for"
    if not rounds_activations(stated):
        return _EXACT
    return None


def rounds_activations(stated: Mapping[str, Any]) -> bool:
    """Return whether every group of the checkpoint declares FP8 activations, which FP8 products require."""
    found = [group.get("input_activations") or {} for group in stated["config_groups"].values()]
    kinds = {(own.get("type"), own.get("num_bits"), own.get("symmetric", True)) for own in found}
    return kinds == {("float", 8, True)}


def rounds_to_bytes(stated: Mapping[str, Any]) -> bool:
    """Return whether every group with weights in 8 whole bits declares such activations, without zero points.

    They are rounded token by token. Scales that a checkpoint has for them, of a whole layer, are not used.
    """
    own = [group.get("input_activations") or {} for group in stated["config_groups"].values() if _is_int8(group)]
    kinds = {(each.get("type"), each.get("num_bits"), each.get("symmetric", True)) for each in own}
    return kinds == {("int", 8, True)}


def _is_int8(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights") or {}
    return (weights.get("type"), weights.get("num_bits")) == ("int", 8)


def open_weights(path: Path, device: str, schemes: Sequence[CompressedScheme] = (FP8_ROWS,)) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; indexing one with `...` reads it, on the CPU.

    Quantized weights are dequantized on `device`; their scales are not listed.

    Args:
        schemes: those that the configuration states.

    Raises:
        ModelError: a quantized weight has no scale, a scale has no weight, or their shapes do not fit.
    """
    entries = StoredEntries(path)
    # Static activation scales are unused, because activations are scaled per token or not at all.
    found = {name: part for name, part in entries.slices.items() if not name.endswith(_ACTIVATIONS)}
    count = 0
    for name, part in entries.slices.items():
        if compressed_fp4.are_numbers(entries, name):
            compressed_fp4.take(entries, name, schemes, device, found)
        elif compressed_integers.are_integers(entries, name):
            compressed_integers.take(entries, name, schemes, device, found)
        elif part.get_dtype() == _FP8 and not compressed_fp4.is_scale(entries, name):
            found[name] = _eight(entries, name, schemes, device)
            found.pop(name + _SCALE)
        else:
            continue
        count += 1
    for name in found:
        if name.endswith(_PARTS):
            raise entries.refusal(name, "is for a weight that is not FP8, NVFP4 or whole numbers")
    if not count:
        kinds = {scheme.word for scheme in schemes}
        words = kinds.pop() if kinds in ({"FP8"}, {"NVFP4"}) else "quantized"
        raise ModelError(
            f"config.json declares {words} weights, but none of the weights is {words}.", "Fetch the checkpoint again."
        )
    return found


def _eight(
    entries: StoredEntries, name: str, schemes: Sequence[CompressedScheme], device: str
) -> Dequantized | LazyWeight:
    """Return an FP8 weight; a checkpoint may have some by row and some by block."""
    own = name + _SCALE
    if own not in entries.slices:
        raise entries.refusal(name, f"is FP8 and has no {own!r}")
    if all((scheme.type, scheme.bits) != ("float", 8) for scheme in schemes):
        raise entries.refusal(name, f"is FP8, but config.json states {'; '.join(map(str, schemes))}")
    part, scale, shape = entries.slices[name], entries.slices[own], entries.shape(name)
    blocks = next((scheme.sizes for scheme in schemes if scheme.strategy == "block"), None)
    rows = [[], [1], [*shape[:-1], 1]] if any(scheme.has_rows for scheme in schemes) else []
    if blocks is None or entries.shape(own) in rows:
        entries.require(own, SCALE_TYPES, *rows)
        entries.refuse_zeros(own)
        return Dequantized(part, scale, device)
    check_scale(entries, name, own, blocks)
    return lazy_blocks({"weight": part, "scale": scale}, device, shape, blocks)


def stored_bytes(path: Path) -> int:
    """Return the bytes that the weights in `path` take as stored."""
    return sum(file.stat().st_size for file in entry_files(path))
