"""SigLIP: tokens of a text see each other, those that fill it up as well."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.contrastive.model import text_states
from beheld.families.model import FamilyModel


def text_vectors(model: Any, embeds_TH: Tensor, positions_T: Tensor) -> Tensor:
    """Return a vector (T, D) at each token; the last one's is the text's."""
    found: Tensor = model.text_model.head(text_states(model, embeds_TH, positions_T))
    return found


MODEL = FamilyModel(text_vectors=text_vectors, towers={"image": ("vision_model",)})
