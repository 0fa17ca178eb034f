"""RoBERTa's head of classes, and the weights of an XLM-RoBERTa with rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.jina_embeddings_v3.weights import merge
from beheld.families.model import FamilyModel


def scores(model: Any, hidden_SH: Tensor) -> Tensor:
    """Return the classes' scores, from the first token's state, or from each token's."""
    if not hasattr(model.classifier, "out_proj"):
        each: Tensor = model.classifier(hidden_SH)
        return each
    found: Tensor = model.classifier(hidden_SH.unsqueeze(1))
    return found


MODEL = FamilyModel(scores=scores, renamed=merge)
