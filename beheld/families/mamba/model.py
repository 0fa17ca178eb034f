"""Mamba-1: mixers on the cache."""

from __future__ import annotations

from beheld.families._shared.mamba.mixer import adapt_channels
from beheld.families.model import FamilyModel

MODEL = FamilyModel(adapt=adapt_channels, plain_head=True)
