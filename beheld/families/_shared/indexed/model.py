"""Runs layers with an indexer as if it picked all positions, as it does in sequences of at most `index_topk`.

transformers' layers pass a part of their mask to the indexer, and what it picks to attention. Without an indexer both
are nothing, and a layer is one of latent attention like any other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel

# The kind of such layers by which transformers looks up their mask: now, and before 5.18.
_KINDS = ("indexed_attention", "deepseek_sparse_attention")


def keywords(model: Any, positions_1T: Tensor) -> dict[str, Any]:
    """Return a mask without elements, for layers that index it; see attention/hook.py."""
    return {"attention_mask": dict.fromkeys(_KINDS, positions_1T.new_empty((1, 1, 0, 0)))}


INDEXED = FamilyModel(keywords=keywords, unread=("indexer",))
