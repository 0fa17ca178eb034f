"""Sizes of a model and of some media, from the configuration alone, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beheld.core.config import EngineArgs
from beheld.core.media import MediaRef
from beheld.engine.setup import describe
from beheld.inputs.pipeline import InputPipeline


def plan(args: EngineArgs, media: Sequence[MediaRef]) -> dict[str, Any]:
    """Sizes of the model, and a receipt per item, as plain JSON types.

    Raises:
        ModelError, MediaError: the model or an item cannot be read.
    """
    info, config, sizes = describe(args)
    receipts = InputPipeline(info, config, args).receipts(list(media)) if media else []
    tokens = sum(receipt.tokens for receipt in receipts)
    return {
        "model": sizes,
        "media": [receipt.to_json() for receipt in receipts],
        "media_tokens": tokens,
        "media_kv_bytes": tokens * sizes["kv_bytes_per_token"],
    }
