"""Bee: images in tiles, as LLaVA-OneVision's."""

from __future__ import annotations

from beheld.families._shared import anyres
from beheld.families.model import FamilyModel

MODEL = FamilyModel(
    adapt=anyres.adapt, combine=anyres.combine, host_features=frozenset(("image_sizes", "batch_num_images"))
)
