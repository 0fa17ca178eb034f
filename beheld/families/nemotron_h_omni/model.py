"""Nemotron 3 Omni: mixers of Mamba-2 on the cache; the tower reads the grids of images on the host."""

from __future__ import annotations

from typing import Any

from beheld.families._shared.mamba.mixer import adapt_heads
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def adapt(model: Any, changes: Changes) -> None:
    """Replace the mixers, and name the head, which is its language model's; see FamilyModel.adapt."""
    adapt_heads(model, changes)
    changes.set(model, "get_output_embeddings", model.language_model.get_output_embeddings)


MODEL = FamilyModel(adapt=adapt, host_features=frozenset(("image_grid_hw",)))
