"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's shape, with positions that begin after the padding token's id."""

from __future__ import annotations

from typing import Any

from beheld.families._shared.encoders.config import learned_only
from beheld.families.family import Family

_TYPES = ("roberta", "xlm-roberta", "camembert")


def first_position(config: Any) -> int:
    """Return the position of the first token."""
    return int(config.pad_token_id) + 1


FAMILY = Family(
    model_types=_TYPES,
    encodes=True,
    both_ways="prompt",
    first_position=first_position,
    convert=dict.fromkeys(_TYPES, learned_only),
)
