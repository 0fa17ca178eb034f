"""Phi-3-vision and Phi-3.5-vision: tiles with line separators before Phi-3; VLM2Vec is the same model."""

from __future__ import annotations

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ReferenceOptions, ShortName

FAMILY = Family(
    model_types=("phi3_v",),
    architectures=("Phi3VForCausalLM",),
    short_names=(
        ShortName(
            "phi-3.5-vision", "microsoft/Phi-3.5-vision-instruct", "phi3_v", "MIT", 4.1, "several images, charts"
        ),
    ),
    tested=(
        KnownCheckpoint(
            "phi3_v",
            "Phi3VForCausalLM",
            "microsoft/Phi-3.5-vision-instruct",
            IMAGE,
            "numbered images, tiles with line separators; a sequence keeps the rotary scale of its prompt; "
            "TIGER-Lab/VLM2Vec-Full has this class too",
            on_gpu=True,
        ),
    ),
    definition=Definition(config="config:Phi3VConfig", model="modeling:Phi3VForCausalLM"),
    reference=ReferenceOptions(merges_inside=True),
)
