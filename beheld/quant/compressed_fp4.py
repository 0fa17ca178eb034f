"""Weights of compressed-tensors in NVFP4, dequantized while loading.

A linear layer (N outputs, K inputs) is stored as

    weight_packed         (N, K / 2)     bytes of two numbers, the earlier in the lower half: a sign, two bits of an
                                         exponent and one of a fraction
    weight_scale          (N, K / 16)    FP8 (E4M3), one for each 16 inputs
    weight_global_scale   (1,)           float32

and a weight's number is number * scale / global scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.quant.compressed_schemes import NVFP4_GROUP, CompressedScheme
from beheld.quant.dequantize import LazyWeight
from beheld.quant.mxfp4_experts import FOUR_BITS
from beheld.quant.stored_as import Axis, StoredAs
from beheld.quant.stored_entries import StoredEntries

PACKED, _SCALE = ".weight_packed", ".weight_scale"
_BYTES, _SCALES, _GLOBAL = "U8", "F8_E4M3", "F32"


def are_numbers(entries: StoredEntries, name: str) -> bool:
    """Return whether there is an entry of this name that holds a weight's numbers."""
    return name.endswith(PACKED) and name in entries.slices and entries.slices[name].get_dtype() == _BYTES


def is_scale(entries: StoredEntries, name: str) -> bool:
    """Return whether an entry holds the scales of such a weight."""
    return name.endswith(_SCALE) and are_numbers(entries, name.removesuffix(_SCALE) + PACKED)


def take(
    entries: StoredEntries, name: str, schemes: Sequence[CompressedScheme], device: str, left: dict[str, Any]
) -> None:
    """Replace the entries of one layer in `left`, which holds entries by name, by its weight.

    Args:
        name: the entry that holds numbers.
        schemes: those that the configuration states.

    Raises:
        ModelError: entries are missing, or their types, shapes or values do not fit.
    """
    module = name.removesuffix(PACKED)
    scale, whole = module + _SCALE, f"{module}.weight_global_scale"
    if not any(scheme.is_nvfp4 for scheme in schemes):
        raise entries.refusal(name, f"holds bytes, but config.json states {'; '.join(map(str, schemes))}")
    shape = entries.shape(name)
    if len(shape) != 2 or 2 * shape[1] % NVFP4_GROUP:
        raise entries.refusal(name, f"has the shape {shape}; expected bytes for multiples of {NVFP4_GROUP} inputs")
    entries.require(entries.partner(name, scale), [_SCALES], [shape[0], 2 * shape[1] // NVFP4_GROUP])
    entries.refuse_zeros(scale)
    entries.require(entries.partner(name, whole), [_GLOBAL], [1], [])
    divisor = float(entries.slices[whole][...].reshape(()))
    if not 0 < divisor < float("inf"):
        raise entries.refusal(whole, f"is {divisor}, which divides scales")
    parts = {"numbers": entries.slices[name], "scale": entries.slices[scale], "whole": entries.slices[whole]}
    for each in (name, scale, whole):
        left.pop(each, None)
    axes = {
        "numbers": (Axis(0), Axis(1, 2)),
        "scale": (Axis(0), Axis(1, NVFP4_GROUP)),
        "whole": (None, None),
    }
    left[f"{module}.weight"] = LazyWeight(parts, _weight, device, StoredAs((shape[0], 2 * shape[1]), axes))


def _weight(numbers: Tensor, scale: Tensor, whole: Tensor) -> Tensor:
    values = torch.tensor(FOUR_BITS, device=numbers.device)
    # A byte's two numbers at once: there are only 256 pairs.
    byte = torch.arange(256, device=numbers.device)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    scale_NG = scale.float() / whole.reshape(())
    found = torch.nn.functional.embedding(numbers.int(), pairs).flatten(1)
    return (found.unflatten(1, (scale_NG.shape[1], -1)) * scale_NG.unsqueeze(-1)).flatten(1)
