"""Gemma 3n, text only: every layer adds an embedding that it looks up by the token's id."""

from __future__ import annotations

from beheld.families._shared import per_layer
from beheld.families.model import FamilyModel

MODEL = FamilyModel(extra_columns=per_layer.extra_columns)
