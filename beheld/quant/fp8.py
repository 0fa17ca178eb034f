"""FP8 checkpoints with a scale for each block of a weight, or one for the whole weight.

Weights with blocks stay as they are where FP8 is multiplied (kept_blocks.py); others are dequantized while loading.

As DeepSeek, Qwen and others publish them: a weight NAME (N, K) in FP8 has NAME_scale_inv (N / B, K / C), rounded up,
in the blocks (B, C) that the configuration states; the number is weight * scale. Without blocks the scale is one
number, NAME_scale or NAME_scale_inv. Merged experts have a leading dimension in both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beheld.core.errors import ModelError
from beheld.quant import cache_scales
from beheld.quant.dequantize import DequantizingMethod, LazyWeight
from beheld.quant.kept_blocks import KeptBlocks, lazy_blocks, scaled
from beheld.quant.method import StorageTarget
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import REFETCH, SCALE_TYPES, StoredEntries

METHOD = "fp8"
_FP8 = "F8_E4M3"
# Exponents alone are scales too.
_TYPES = (*SCALE_TYPES, "F8_E8M0")
_SCALES = ("_scale_inv", "_scale")
# Products round activations by these; dequantized weights are multiplied by activations as they are.
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")


def make(stated: Mapping[str, Any], target: StorageTarget) -> DequantizingMethod:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    blocks = stated.get("weight_block_size")
    if blocks is not None and not _are_sizes(blocks):
        raise ModelError(f"The checkpoint states weight_block_size {blocks!r}; expected two sizes.", REFETCH)
    form = str(stated.get("fmt") or "e4m3")
    if not form.startswith("e4m3") and form != "float8_e4m3fn":
        raise ModelError(f"FP8 weights of the form {form!r} are not supported.", "Use one with E4M3 weights.")
    words = "FP8 weights" if blocks is None else f"FP8 weights in blocks of {blocks[0]} x {blocks[1]}"
    has_cache = cache_scales.are_stated(stated)

    def read(path: Path) -> dict[str, Any]:
        found = open_weights(path, blocks, target.device)
        return cache_scales.left_out(found) if has_cache else found

    return DequantizingMethod(METHOD, words, read, None if blocks is None else KeptBlocks(target))


def _are_sizes(blocks: Any) -> bool:
    return isinstance(blocks, Sequence) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)


def open_weights(path: Path, blocks: Sequence[int] | None, device: str) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; FP8 ones are dequantized on `device` when they are read.

    Raises:
        ModelError: a weight has no scale, a scale has no weight, or their shapes do not fit.
    """
    entries = StoredEntries(path)
    found = dict(entries.slices)
    eights = [name for name, part in entries.slices.items() if part.get_dtype() == _FP8]
    if not eights:
        raise ModelError("config.json declares FP8 weights, but none of the weights is FP8.", REFETCH)
    for name in eights:
        scale = next((name + suffix for suffix in _SCALES if name + suffix in entries.slices), None)
        if scale is None:
            raise entries.refusal(name, f"is FP8 and has no {name + _SCALES[0]!r}")
        check_scale(entries, name, scale, blocks)
        del found[scale]
        parts = {"weight": entries.slices[name], "scale": entries.slices[scale]}
        if blocks is None:
            shape = entries.shape(name)
            axes = {"weight": (Axis(0), Axis(1)), "scale": (None, None)}
            stored = StoredAs((shape[0], shape[1]), axes) if len(shape) == 2 else None
            found[name] = LazyWeight(parts, functools.partial(scaled, blocks=None), device, stored)
        else:
            found[name] = lazy_blocks(parts, device, entries.shape(name), blocks)
    for name in [name for name in found if name.endswith(_ACTIVATION_SCALES)]:
        del found[name]
    for name in found:
        if name.endswith(tuple(".weight" + suffix for suffix in _SCALES)):
            raise entries.refusal(name, "is the scale of a weight that is not FP8")
    return found


def check_scale(entries: StoredEntries, name: str, scale: str, blocks: Sequence[int] | None) -> None:
    """Refuse a scale of another type or shape than the weight `name` needs, and zeros.

    Raises:
        ModelError: it is so.
    """
    shape = entries.shape(name)
    if blocks is None:
        one_each = [[*shape[:-2], 1, 1]] if len(shape) > 2 else []
        entries.require(scale, _TYPES, [], [1], *one_each)
    elif len(shape) < 2:
        raise entries.refusal(name, f"has the shape {shape}, and blocks need two dimensions")
    else:
        counts = [-(-size // block) for size, block in zip(shape[-2:], blocks, strict=True)]
        entries.require(scale, _TYPES, [*shape[:-2], *counts])
    entries.refuse_zeros(scale)
