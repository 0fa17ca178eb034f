"""Qwen3-Next: three of four layers have the gated delta rule instead of attention; experts."""

from __future__ import annotations

from beheld.families._shared.gated_delta.config import delta_state
from beheld.families.family import Family, KnownCheckpoint

FAMILY = Family(
    model_types=("qwen3_next",),
    tested=(
        KnownCheckpoint(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            note="gated delta rule in three of four layers; experts",
            on_gpu=True,
        ),
    ),
    state=delta_state,
    calls=("qwen3_coder", "hermes"),
    reasoning=("think",),
)
