"""Fuyu: one matrix turns patches into embeddings."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(towers={"image": ("model.vision_embed_tokens",)})
