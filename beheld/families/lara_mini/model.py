"""Lara Mini: Qwen3.5's mixers; its layers with all positions do not rotate."""

from __future__ import annotations

from beheld.families._shared.gated_delta.mixer import replace_mixers
from beheld.families.model import FamilyModel

MODEL = FamilyModel(adapt=replace_mixers, plain_head=True)
