"""Encoder-decoders that are made of two published models, an encoder and a decoder with a head."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from beheld.core.errors import ModelError

DECODERS = ("mbart", "trocr")


def check_parts(config: Any, name: str, encoders: Collection[str]) -> None:
    """Check that both parts are of types whose layers the engine computes.

    Raises:
        ModelError: one is of another type.
    """
    for part, known in ((config.encoder, encoders), (config.decoder, DECODERS)):
        if part.model_type not in known:
            raise ModelError(
                f"{name} with a part of the type {part.model_type!r} cannot be run yet.",
                f"Possible are an encoder of {', '.join(encoders)}, and a decoder of {' or '.join(DECODERS)}.",
            )


def start_of(config: Any) -> int:
    """Return the id of the token that starts every answer."""
    named = (getattr(part, "decoder_start_token_id", None) for part in (config, config.decoder))
    start: int = next((found for found in named if found is not None), config.decoder.bos_token_id)
    return start
