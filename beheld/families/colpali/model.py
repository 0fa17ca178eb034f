"""ColPali: a linear layer after the last hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel


def vectors(model: Any, hidden_SH: Tensor) -> Tensor:
    """Return the tokens' vectors, before they are scaled."""
    found: Tensor = model.embedding_proj_layer(hidden_SH)
    return found


MODEL = FamilyModel(vectors=vectors)
