"""Step 3.7: tiles and an overview; experts; layers that slide have heads of their own."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("step3p7",),
    tested=(
        KnownCheckpoint(
            "step3p7",
            "Step3p7ForConditionalGeneration",
            "stepfun-ai/Step-3.7-Flash",
            IMAGE,
            "tiles and an overview; experts; sliding and full layers",
            by_census=True,
        ),
    ),
    calls=("qwen3_coder",),
    reasoning=("think",),
)
