"""Seer's model as the engine runs it: its tower reads sizes as numbers."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(host_features=frozenset(("image_sizes",)), towers={"image": ("model.vision_tower",)})
