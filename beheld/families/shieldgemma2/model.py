"""ShieldGemma 2: the weights are Gemma 3's within a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from beheld.families.model import FamilyModel

_WHOLE = "model."


def renamed(weights: Mapping[str, Tensor], raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights without the classifier's prefix; see FamilyModel.renamed."""
    return {name.removeprefix(_WHOLE): weight for name, weight in weights.items()}


MODEL = FamilyModel(renamed=renamed)
