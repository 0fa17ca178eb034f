"""GLM-5: text only; latent attention, experts, and indexers that layers share, as long as they pick all positions."""

from __future__ import annotations

from beheld.families._shared.indexed.config import dense_up_to
from beheld.families.family import Family

FAMILY = Family(model_types=("glm_moe_dsa",), dense_up_to=dense_up_to, calls=("glm45",), reasoning=("think",))
