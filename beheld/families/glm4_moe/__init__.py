"""GLM-4.5 to 4.7: text only."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("glm4_moe",),
    calls=("glm45",),
    reasoning=("think",),
)
