"""What the configurations of CLIP and SigLIP say."""

from __future__ import annotations

from typing import Any

from beheld.core.pooling import PoolerInfo


def placeholders(config: Any) -> dict[str, int]:
    """Return the id that stands for an image: the first after the vocabulary."""
    return {"image": int(config.text_config.vocab_size)}


def pools_clip(config: Any) -> PoolerInfo:
    """Return how CLIP pools: the state of the end of a text, or the one vector of an image."""
    return PoolerInfo(method="last", width=config.projection_dim, whole=True)


def pools_siglip(config: Any) -> PoolerInfo:
    """Return how SigLIP pools: the last state of a text that is filled up to the length of its training."""
    text = config.text_config
    return PoolerInfo(
        method="last", width=text.projection_size, whole=True, filled_to=int(text.max_position_embeddings)
    )
