"""ModernBERT: an encoder with rotary positions, most of whose layers look at a window."""

from __future__ import annotations

from typing import Any

from beheld.families.family import Family


def pools_for_classes(config: Any) -> str:
    """Return how hidden states are pooled for the classes."""
    return str(config.classifier_pooling)


FAMILY = Family(
    model_types=("modernbert",),
    encodes=True,
    both_ways="prompt",
    late={"ColBERTModernBertModel": "ModernBertModel"},
    pools_for_classes=pools_for_classes,
)
