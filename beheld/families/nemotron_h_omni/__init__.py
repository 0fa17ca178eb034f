"""Nemotron 3 Omni: RADIO's tower before Nemotron-H; it takes neither videos nor audio here yet."""

from __future__ import annotations

from beheld.families.family import IMAGE, UNDEFINED, Family, KnownCheckpoint, OldestTransformers
from beheld.families.nemotron_h import state_of

FAMILY = Family(
    model_types=("nemotron_h_omni",),
    tested=(
        KnownCheckpoint(
            "nemotron_h_omni",
            "NemotronH_Omni_Reasoning_V3",
            "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",
            IMAGE,
            "Mamba-2, attention, MLPs and experts in turn; no videos and no audio",
            by_census=True,
        ),
    ),
    oldest=OldestTransformers("5.18", UNDEFINED),
    placeholders=lambda config: {"image": config.image_token_id},
    state=state_of,
    calls=("qwen3_coder", "nemotron"),
    reasoning=("think",),
)
