"""Configurations of models with an indexer; no torch."""

from __future__ import annotations

from typing import Any

from beheld.core.errors import ModelError


def dense_up_to(text: Any) -> int:
    """Return of how many positions an indexer picks all: as many as it picks at most.

    Raises:
        ModelError: it picks none.
    """
    picked: int = text.index_topk
    if picked < 1:
        raise ModelError(
            f"config.json says index_topk {picked}: the indexer of {text.model_type} would pick no position.",
            "Mend config.json, or fetch the checkpoint again.",
        )
    return picked
