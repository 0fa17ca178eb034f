"""PaliGemma and PaliGemma 2: attention within the prompt runs both ways."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("paligemma",),
    tested=(
        KnownCheckpoint(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            "google/paligemma-3b-mix-224",
            IMAGE,
            "the prompt is read both ways, in one step; no shared prefixes; images only; messages cannot be continued",
            whole_prompts=True,
            on_gpu=True,
        ),
        KnownCheckpoint(
            "paligemma2",
            "PaliGemmaForConditionalGeneration",
            "google/paligemma2-3b-ft-docci-448",
            IMAGE,
            "as PaliGemma, with soft caps",
            whole_prompts=True,
        ),
    ),
    both_ways="prompt",
    grounding=Grounding("locs label", 1024, rows_first=True),
)
