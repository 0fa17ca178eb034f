"""The fixed order of surgery on a loaded model: quantize, shard, fuse, LoRA, compile; so far, only fuse."""

from __future__ import annotations

from typing import Any

from beheld.core.config import EngineConfig
from beheld.models.fuse import small_batch_linears
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def prepare(model: Any, config: EngineConfig) -> Any:
    """Make a loaded transformers model fast on its device; returns the same model."""
    if config.device == "cpu" and config.dtype == "float32" and not config.enforce_eager:
        logger.debug("%d linear layers compute small batches by outputs.", small_batch_linears(model))
    return model
