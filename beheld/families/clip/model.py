"""CLIP: its text tower is causal, and each tower is followed by a projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from beheld.families._shared.contrastive.model import text_states
from beheld.families.model import FamilyModel


def text_vectors(model: Any, embeds_TH: Tensor, positions_T: Tensor) -> Tensor:
    """Return a vector (T, D) at each token; the last one's is the text's."""
    found: Tensor = model.text_projection(text_states(model, embeds_TH, positions_T, is_causal=True))
    return found


MODEL = FamilyModel(text_vectors=text_vectors, towers={"image": ("vision_model", "visual_projection")})
