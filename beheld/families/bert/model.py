"""BERT's head of classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel


def scores(model: Any, hidden_SH: Tensor) -> Tensor:
    """Return the classes' scores: a layer on the first token's state, then the classes.

    A head for every token has no such layer.
    """
    if model.bert.pooler is None:
        each: Tensor = model.classifier(hidden_SH)
        return each
    found: Tensor = model.classifier(model.bert.pooler(hidden_SH.unsqueeze(1)))
    return found


MODEL = FamilyModel(scores=scores)
