"""GLM-4.7-Flash: text only; latent attention and experts."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("glm4_moe_lite",),
    tested=(
        KnownCheckpoint(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            "zai-org/GLM-4.7-Flash",
            note="latent attention (MLA); experts; the layer that guesses a further token is left out",
            on_gpu=True,
        ),
    ),
    calls=("glm45",),
    reasoning=("think",),
)
