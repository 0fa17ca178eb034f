"""What the configuration of a model of late interaction says."""

from __future__ import annotations

from typing import Any

from beheld.core.pooling import PoolerInfo


def pools(config: Any) -> PoolerInfo:
    """Return how the class of a configuration with `vlm_config` pools."""
    return PoolerInfo(task="token_embed", late=True, width=config.embedding_dim)
