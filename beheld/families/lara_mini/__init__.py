"""Lara Mini: layers with the gated delta rule, with windows and with all positions; experts."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import UNDEFINED, Family, OldestTransformers

FAMILY = Family(
    model_types=("lara_mini",),
    oldest=OldestTransformers("5.24", UNDEFINED),
    state=delta_state,
)
