"""Which models ranks can share, as far as their configuration tells."""

from __future__ import annotations

from beheld.core.config import ModelInfo
from beheld.core.errors import ModelError
from beheld.runner.cache.registry import make_caches


def check_shardable(info: ModelInfo, quantization: str | None) -> None:
    """Refuse a model that ranks cannot share.

    Raises:
        ModelError: names what cannot be shared out.
    """
    found = (cache.unshared for cache in make_caches(info).all)
    unshared = next((reason for reason in found if reason is not None), None)
    reason = None
    if unshared is not None:
        reason = f"{unshared}, and ranks cannot share that yet"
    elif info.is_encoder_decoder:
        reason = "models with an encoder for the prompt are not shared by ranks yet"
    elif info.pooler is not None:
        reason = "models that make vectors or scores are not shared by ranks yet"
    elif quantization is not None:
        reason = f"weights quantized by {quantization!r} as they are loaded are not shared out yet"
    if reason is not None:
        raise ModelError(f"{info.architecture} cannot run with tensor_parallel_size above 1: {reason}.", "Give 1.")
