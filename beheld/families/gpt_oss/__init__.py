"""gpt-oss: text only; sliding and full layers in turn, whose heads have sinks, and experts of a gate of their own."""

from __future__ import annotations

from beheld.families.family import Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("gpt_oss",),
    tested=(
        KnownCheckpoint(
            "gpt_oss",
            "GptOssForCausalLM",
            "openai/gpt-oss-20b",
            note="sliding and full layers; attention sinks; experts, dequantized from MXFP4 as they are loaded",
            on_gpu=True,
        ),
    ),
    # Fused attention of PyTorch has no sinks.
    reference=ReferenceOptions(attention="eager"),
    calls=("openai",),
    reasoning=("openai",),
)
