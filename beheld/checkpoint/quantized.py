"""What config.json says of how its weights are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.config import AT_LOAD_AS, QUANTIZED_AT_LOAD
from beheld.core.errors import ConfigError

# Some publishers state it for the part that is quantized only; older files of compressed-tensors use the second name.
_PARTS = ("text_config", "thinker_config")
_NAMES = ("quantization_config", "compression_config")
# Methods whose weights are always dequantized, and may be quantized again in the form that the device multiplies.
_DEQUANTIZED = ("gguf",)


def stated(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of config.json's content `raw` that says how weights are quantized; None if they are not."""
    here: Mapping[str, Any] | None = next((raw[name] for name in _NAMES if raw.get(name)), None)
    if here is not None:
        return here
    parts = (stated(raw[part]) for part in _PARTS if isinstance(raw.get(part), Mapping))
    return next((found for found in parts if found is not None), None)


def check(asked: str | None, raw: Mapping[str, Any]) -> None:
    """Refuse the option `quantization` where it neither names what the checkpoint is nor a method for its weights.

    Raises:
        ConfigError: as above.
    """
    if asked is None:
        return
    found = stated(raw)
    method = None if found is None else found.get("quant_method")
    if method in (None, *_DEQUANTIZED) and asked in (*QUANTIZED_AT_LOAD, *AT_LOAD_AS):
        return
    if asked != method:
        said = "is not quantized" if method is None else f"is quantized by {method!r}"
        raise ConfigError(
            f"quantization={asked!r} was asked for, but the checkpoint {said}.",
            "Leave the option out: the checkpoint itself says what it is.",
            param="quantization",
        )
