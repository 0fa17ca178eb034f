"""OLMo Hybrid: three of four layers have the gated delta rule instead of attention, whose layers have no positions."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import Family

FAMILY = Family(model_types=("olmo_hybrid",), state=delta_state)
