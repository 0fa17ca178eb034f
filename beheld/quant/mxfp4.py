"""MXFP4 checkpoints, dequantized while loading: experts whose numbers have four bits, with a scale for each 32 of them.

An expert's weight (O outputs, I inputs) is stored as `NAME_blocks`, bytes of two numbers each, and `NAME_scales`,
exponents of two in bytes:

    blocks (E, O, I / 32, 16)    the lower half of a byte is the earlier number
    scales (E, O, I / 32)        127 stands for a factor of 1

transformers' class has it the other way round, `NAME` (E, I, O). Every such number is exact in bfloat16.

Shapes: E experts, O outputs, I inputs, G groups of an output's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beheld.core.errors import ModelError
from beheld.quant.dequantize import without_quantization
from beheld.quant.method import Replace, StorageTarget, TextOf
from beheld.quant.stored_entries import weight_files
from beheld.utils.log import get_logger

logger = get_logger(__name__)

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
# The numbers of four bits: a sign, two bits of an exponent and one of a fraction.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127
_BLOCK_BYTES = 16


def make(stated: Mapping[str, Any], target: StorageTarget) -> MXFP4:
    """Return the method for a checkpoint's quantization_config, `stated`; see quant/method.py."""
    return MXFP4()


class MXFP4:
    """See QuantMethod; nothing is kept as stored."""

    name = METHOD
    converted = "its MXFP4 weights dequantized"

    def config(self, hf_config: Any) -> Any:
        """Return a copy without the quantization_config, so that transformers loads plain weights."""
        return without_quantization(hf_config)

    def weights(self, path: Path) -> dict[str, Any] | None:
        """Return the weights, quantized ones dequantized when they are read."""
        return open_weights(path)

    def loading(self, model_class: Any, weights: dict[str, Any]) -> Any:
        """Return the class unchanged."""
        logger.warning(
            "MXFP4 weights are dequantized as they are loaded: the model takes the memory of an unquantized one."
        )
        return model_class

    def settle(self, model: Any, model_class: Any, text_of: TextOf, replace: Replace) -> None:
        """Do nothing."""

    def stored_bytes(self, path: Path, model: Any, text_of: TextOf) -> int | None:
        """Return None: weights take what their numbers take."""
        return None


class DequantizedExperts:
    """Experts' weights (E, I, O), dequantized when they are read, for transformers' loader in place of a slice."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part `index` in bfloat16, which holds every number of it."""
        return dequantized(self._blocks[...], self._scales[...])[index]


def dequantized(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Return the numbers (E, I, O) of blocks and scales, in bfloat16."""
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    # A byte's two numbers at once: there are only 256 pairs.
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    experts, outputs = scales_EOG.shape[:2]
    found = torch.empty(experts, 2 * blocks_EOGB[0, 0].numel(), outputs, dtype=torch.bfloat16)
    # One expert at a time: indices take eight bytes for each of the two numbers that a byte holds.
    for own_OGB, exponents_OG, out_IO in zip(blocks_EOGB, scales_EOG, found, strict=True):
        factors_OG1 = torch.ldexp(torch.ones(exponents_OG.shape), exponents_OG.int() - _BIAS).unsqueeze(-1)
        numbers_OGB2 = pairs[own_OGB.int()]
        out_IO.copy_((numbers_OGB2.flatten(2) * factors_OG1).flatten(1).t())
    return found


def open_weights(path: Path) -> dict[str, Any]:
    """Return the checkpoint's weights by name, unread; indexing one with `...` reads it, on the CPU.

    Raises:
        ModelError: blocks have no scales, scales no blocks, or their shapes do not fit.
    """
    from safetensors import safe_open

    slices: dict[str, Any] = {}
    for file in weight_files(path):
        opened = safe_open(file, framework="pt", device="cpu")
        slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    blocked = {name.removesuffix(_BLOCKS) for name in slices if name.endswith(_BLOCKS)}
    scaled = {name.removesuffix(_SCALES) for name in slices if name.endswith(_SCALES)}
    if not blocked:
        raise ModelError(
            "config.json declares MXFP4 weights, but none of the weights is MXFP4.", "Fetch the checkpoint again."
        )
    for name in sorted(blocked ^ scaled):
        there, missing = (_BLOCKS, _SCALES) if name in blocked else (_SCALES, _BLOCKS)
        raise ModelError(f"{name + there!r} has no {name + missing!r}.", "Fetch the checkpoint again.")
    for name in blocked:
        blocks, scales = slices.pop(name + _BLOCKS), slices.pop(name + _SCALES)
        _check(name, blocks, scales)
        slices[name] = DequantizedExperts(blocks, scales)
    return slices


def _check(name: str, blocks: Any, scales: Any) -> None:
    kinds = blocks.get_dtype(), scales.get_dtype()
    shape, own = list(blocks.get_shape()), list(scales.get_shape())
    if kinds != ("U8", "U8") or len(shape) != 4 or shape[:3] != own or shape[3] != _BLOCK_BYTES:
        raise ModelError(
            f"{name + _BLOCKS!r} is {kinds[0]} of the shape {shape} and its scales are {kinds[1]} of {own}: expected "
            f"bytes of the shapes [experts, outputs, groups, {_BLOCK_BYTES}] and [experts, outputs, groups].",
            "Use openai's layout of such checkpoints, or fetch the checkpoint again.",
        )
