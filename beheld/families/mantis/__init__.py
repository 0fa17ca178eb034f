"""Mantis: LLaVA's model; prompts number their images."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("llava",),
    tested=(
        KnownCheckpoint(
            "mantis",
            "LlavaForConditionalGeneration",
            "TIGER-Lab/Mantis-8B-siglip-llama3",
            IMAGE,
            "as LLaVA; images are numbered in words",
        ),
    ),
    architectures=("MantisForConditionalGeneration",),
    processors=("MLlavaProcessor",),
)
