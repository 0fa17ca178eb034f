"""Ling 3.0 (Bailing hybrid): Kimi's delta attention, and latent attention with a gate for each head."""

from __future__ import annotations

from beheld.families.family import Family
from beheld.families.kimi_linear import state_of

FAMILY = Family(model_types=("bailing_hybrid",), state=state_of)
