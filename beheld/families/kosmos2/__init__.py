"""Kosmos 2: one image, read by learned queries, before a prompt that may ask for places."""

from __future__ import annotations

from beheld.families.family import IMAGE, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("kosmos-2",),
    tested=(
        KnownCheckpoint(
            "kosmos-2",
            "Kosmos2ForConditionalGeneration",
            "microsoft/kosmos-2-patch14-224",
            IMAGE,
            "one image, before the prompt; `<grounding>` asks for places",
            one_image=True,
            by_census=True,
        ),
    ),
    placeholder_tokens={"image": "<image>"},
)
