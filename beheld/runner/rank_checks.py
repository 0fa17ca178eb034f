"""Which models ranks can share, as far as their configuration tells."""

from __future__ import annotations

from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError
from beheld.runner.cache.registry import make_caches


def unshared(info: ModelInfo, quantization: str | None) -> str | None:
    """Return why ranks cannot share a model, in words; None if they can, as far as its configuration tells."""
    found = (cache.unshared for cache in make_caches(info).all)
    reason = next((reason for reason in found if reason is not None), None)
    if reason is not None:
        return f"{reason}, and ranks cannot share that yet"
    if info.is_encoder_decoder:
        return "models with an encoder for the prompt are not shared by ranks yet"
    if info.pooler is not None:
        return "models that make vectors or scores are not shared by ranks yet"
    if quantization is not None:
        return f"weights quantized by {quantization!r} as they are loaded are not shared out yet"
    return None


def check_shardable(info: ModelInfo, quantization: str | None) -> None:
    """Refuse a model that ranks cannot share.

    Raises:
        ModelError: names what cannot be shared out.
    """
    reason = unshared(info, quantization)
    if reason is not None:
        raise ModelError(f"{info.architecture} cannot run with tensor_parallel_size above 1: {reason}.", "Give 1.")
