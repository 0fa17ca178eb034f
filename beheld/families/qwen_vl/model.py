"""Qwen-VL's model as the engine runs it."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(towers={"image": ("model.visual",)})
