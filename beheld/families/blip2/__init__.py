"""BLIP-2: one image before the prompt, read by learned queries."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ReferenceOptions

FAMILY = Family(
    model_types=("blip-2",),
    tested=(
        KnownCheckpoint(
            "blip2",
            "Blip2ForConditionalGeneration",
            "Salesforce/blip2-opt-2.7b",
            IMAGE,
            "one image, before the prompt; learned positions; with OPT only",
            one_image=True,
        ),
    ),
    reference=ReferenceOptions(text_model_alone=True),
)
