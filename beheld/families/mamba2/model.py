"""Mamba-2: mixers on the cache."""

from __future__ import annotations

from beheld.families._shared.mamba.mixer import adapt_heads
from beheld.families.model import FamilyModel

MODEL = FamilyModel(adapt=adapt_heads, plain_head=True)
