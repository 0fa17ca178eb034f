"""Encoders of BERT's shape have learned positions; checkpoints whose config.json says others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError


def learned_only(raw: Mapping[str, Any]) -> None:
    """Refuse other positions, which transformers' classes would take for learned ones.

    Args:
        raw: the content of config.json.

    Raises:
        ModelError: they are rotary or relative.
    """
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ModelError(
            f"An encoder of the type {raw.get('model_type')!r} with {kind!r} positions is not built: only learned "
            "(absolute) ones are.",
            "Use another embedding model, such as BAAI/bge-m3.",
        )
