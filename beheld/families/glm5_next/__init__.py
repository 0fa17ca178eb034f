"""GLM-5 Next, which cannot be run yet."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("glm5_next", "glm5_next_text"),
    refused=(
        "an indexer chooses the groups of positions that its latent layers see, its other layers keep a recurrent "
        "state whose gate forgets by channel (Kimi's delta attention), and hyper-connections carry several residual "
        "streams between its layers; none of the three is computed here yet"
    ),
)
