"""ModernBERT's head of classes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel


def scores(model: Any, hidden_SH: Tensor) -> Tensor:
    """Return the classes' scores: a layer with a norm on the pooled state, then the classes."""
    found: Tensor = model.classifier(model.head(hidden_SH))
    return found


MODEL = FamilyModel(scores=scores)
