"""GLM-5 Next, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("glm5_next", "glm5_next_text"),
    refused=(
        "an indexer chooses the groups of positions that its latent layers see, and hyper-connections carry several "
        "residual streams between its layers; neither is computed here yet (Kimi's delta attention of its other layers "
        "is)"
    ),
)
