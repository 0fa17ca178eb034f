"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's shape, with positions that begin after the padding token's id.

An XLM-RoBERTa with rotary positions is Jina Embeddings v3, whose folder reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families._shared.encoders.config import learned_only
from beheld.families.family import Family
from beheld.families.jina_embeddings_v3.config import convert, is_rotary


def first_position(config: Any) -> int:
    """Return the position of the first token."""
    return int(config.pad_token_id) + 1


def _learned_or_rotary(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Convert a configuration with rotary positions; others, except learned ones, are refused."""
    if is_rotary(raw):
        return convert(raw)
    learned_only(raw)
    return None


FAMILY = Family(
    model_types=("roberta", "xlm-roberta", "camembert"),
    encodes=True,
    both_ways="prompt",
    first_position=first_position,
    convert={"roberta": learned_only, "xlm-roberta": _learned_or_rotary, "camembert": learned_only},
)
