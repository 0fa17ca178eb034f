"""The only list of quantization methods, by the checkpoint's `quant_method`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from beheld.core.errors import ModelError
from beheld.quant.method import Make, QuantMethod
from beheld.quant.none import Unquantized

# A checkpoint's `quant_method` -> "module:name" of the function that makes the method, imported on use.
METHODS: dict[str, str] = {
    "compressed-tensors": "beheld.quant.compressed_tensors:make",
    "mxfp4": "beheld.quant.mxfp4:make",
}


def method_for(stated: Mapping[str, Any] | None, device: str, dtype: torch.dtype) -> QuantMethod:
    """Return the method for a checkpoint.

    Args:
        stated: its `quantization_config`; None if its weights are not quantized.
        device, dtype: the model's device, and the type of the activations.

    Raises:
        ModelError: the method, or this form of it, is not supported.
    """
    if stated is None:
        return Unquantized()
    method = stated.get("quant_method")
    place = METHODS.get(str(method))
    if place is None:
        known = ", ".join(repr(name) for name in sorted(METHODS))
        raise ModelError(
            f"The weights are quantized by {method!r}, which is not supported.",
            f"Use the unquantized checkpoint, or one quantized by {known}.",
        )
    module, name = place.split(":")
    make: Make = getattr(importlib.import_module(module), name)
    return make(stated, device, dtype)
