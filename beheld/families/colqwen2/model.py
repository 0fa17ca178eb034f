"""ColQwen2: Qwen2-VL's tower, and a linear layer after the last hidden states.

Positions have three axes, as in the model's own code. transformers' ColQwen2ForRetrieval takes plain ones for images,
because it gives its language model embeddings without ids.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel, PackedTower


def vectors(model: Any, hidden_SH: Tensor) -> Tensor:
    """Return the tokens' vectors, before they are scaled."""
    found: Tensor = model.embedding_proj_layer(hidden_SH)
    return found


MODEL = FamilyModel(vectors=vectors, packed=PackedTower(), packs_attention=True, positions_by_kind=True)
