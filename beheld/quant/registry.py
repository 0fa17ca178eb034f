"""The only list of quantization methods, by the checkpoint's `quant_method` or by the option `quantization`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError
from beheld.quant.method import Make, QuantMethod, StorageTarget
from beheld.quant.none import Unquantized
from beheld.quant.requantized import Requantized

# A checkpoint's `quant_method` -> "module:name" of the function that makes the method, imported on use.
# core/config.py lists the names for code that does not import torch.
METHODS: dict[str, str] = {
    "auto-round": "beheld.quant.auto_round:make",
    "awq": "beheld.quant.awq:make",
    "bitsandbytes": "beheld.quant.bitsandbytes:make",
    "compressed-tensors": "beheld.quant.compressed_tensors:make",
    "fp8": "beheld.quant.fp8:make",
    "gguf": "beheld.quant.gguf:make",
    "gptq": "beheld.quant.gptq:make",
    "mxfp4": "beheld.quant.mxfp4:make",
    "torchao": "beheld.quant.torchao:make",
}

# The option's value -> the function that makes the method that quantizes any checkpoint's weights as they are loaded.
# core/config.py lists the names for code that does not import torch.
AT_LOAD: dict[str, str] = {
    "fp8": "beheld.quant.float8_at_load:make",
    "int4": "beheld.quant.int4:make",
    "int8": "beheld.quant.int8:make",
    "nf4": "beheld.quant.coded:make_nf4",
}


def method_for(stated: Mapping[str, Any] | None, at_load: str | None, target: StorageTarget) -> QuantMethod:
    """Return the method for a checkpoint.

    Args:
        stated: its `quantization_config`; None if its weights are not quantized.
        at_load: the method by which weights are quantized as they are loaded, after `stated` dequantized them; None for
            none.
        target: what weights are made for.

    Raises:
        ModelError: the method, or this form of it, is not supported.
    """
    if stated is None and at_load is None:
        return Unquantized()
    if stated is None:
        return _made(AT_LOAD[str(at_load)], {}, target)
    method = stated.get("quant_method")
    place = METHODS.get(str(method))
    if place is None:
        known = ", ".join(repr(name) for name in sorted(METHODS))
        raise ModelError(
            f"The weights are quantized by {method!r}, which is not supported.",
            f"Use the unquantized checkpoint, or one quantized by {known}.",
        )
    read = _made(place, stated, target)
    return read if at_load is None else Requantized(read, _made(AT_LOAD[at_load], {}, target))


def _made(place: str, stated: Mapping[str, Any], target: StorageTarget) -> QuantMethod:
    module, name = place.split(":")
    make: Make = getattr(importlib.import_module(module), name)
    return make(stated, target)
