"""HunyuanOCR: its tower packs images, and takes no positions."""

from __future__ import annotations

from beheld.families.model import FamilyModel

MODEL = FamilyModel(packed=(), packs_attention=True)
