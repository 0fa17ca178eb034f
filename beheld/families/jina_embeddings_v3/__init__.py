"""Jina Embeddings v3: XLM-RoBERTa with rotary positions and adapters for tasks, in its publisher's layout or another.

The publisher's config.json has the model type of XLM-RoBERTa and `position_embedding_type: "rotary"`, so that the
family of that type reads it, with `convert` and `merge` of this folder. transformers' own layout has no adapters.
"""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("jina_embeddings_v3",),
    encodes=True,
    both_ways="prompt",
)
