"""Qwen3-Omni: Qwen2.5-Omni with experts, and a tower whose features also enter the first layers."""

from __future__ import annotations

from beheld.families.family import ALL, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    tested=(
        KnownCheckpoint(
            "qwen3_omni_moe",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen/Qwen3-Omni-30B-A3B-Instruct",
            ALL,
            "as Qwen2.5-Omni; experts; each audio is read as if it were the only one of its prompt",
            on_gpu=True,
        ),
    ),
    reads_by="Qwen3OmniMoeThinkerForConditionalGeneration",
    reference=ReferenceOptions(wants_frame_rate=True),
    calls=("hermes",),
    reasoning=("think",),
)
