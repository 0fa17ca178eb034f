"""What a checkpoint says of an 8-bit cache of keys and values: left out, for they are kept in the activations' type."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from beheld.utils.log import get_logger, once

logger = get_logger(__name__)

# Of attention: scales of queries, keys and values, as compressed-tensors and FP8 checkpoints name them.
_SCALES = tuple(
    f".{name}"
    for name in (
        "q_scale", "k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point",
        "k_proj.output_scale", "v_proj.output_scale",
    )
)  # fmt: skip


def are_stated(stated: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config asks for a cache in fewer bits; the log then says what happens instead."""
    if not stated.get("kv_cache_scheme"):
        return False
    once(
        logger,
        logging.WARNING,
        "The checkpoint asks for keys and values in fewer bits. They keep the type of activations, which is more exact "
        "and takes more memory; its scales for them are not used. kv_cache_dtype='fp8' keeps 8 bits without scales.",
    )
    return True


def left_out(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights without scales of keys and values."""
    return {name: part for name, part in weights.items() if not name.endswith(_SCALES)}
