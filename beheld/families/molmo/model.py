"""Molmo's model as the engine runs it."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(host_features=frozenset(("sizes",)), towers={"image": ("model.vision_backbone",)})
