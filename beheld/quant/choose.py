"""The one place that decides what becomes of FP8 weights: multiplied as they are, or dequantized as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from beheld.platform.registry import platform_of
from beheld.quant.compressed_tensors import rounds_activations
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

FLOAT8, DEQUANTIZED = "float8", "dequantized"


def choose(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> str:
    """FLOAT8 or DEQUANTIZED, for a checkpoint that says `stated` and a model of this type on this device; logged."""
    reason = objection(stated, device, dtype)
    if reason is None:
        logger.info("FP8 weights stay as they are; products are of FP8 numbers, activations rounded token by token.")
        return FLOAT8
    logger.warning(
        "FP8 weights are dequantized as they are loaded, since %s: the model takes the memory of an unquantized "
        "one, and activations are not rounded.",
        reason,
    )
    return DEQUANTIZED


def objection(stated: Mapping[str, Any], device: str, dtype: torch.dtype) -> str | None:
    """Why not FLOAT8, in words; None if nothing speaks against it."""
    if not platform_of(device).fp8_products:
        return "this device has no products of FP8 numbers"
    if not env.FP8():
        return "BEHELD_FP8=0"
    if dtype != torch.bfloat16:
        return f"products of FP8 numbers are given in bfloat16, and {str(dtype).removeprefix('torch.')} was asked for"
    if not rounds_activations(stated):
        return "the checkpoint's activations are not FP8"
    return None
