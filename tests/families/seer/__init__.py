"""Seer: a small model that transformers does not know, with a configuration, a model and a processor of its own."""

from __future__ import annotations

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("seer",),
    tested=(
        KnownCheckpoint("seer", "SeerForConditionalGeneration", "nobody/seer", IMAGE, "images at their native size"),
    ),
    definition=Definition(config="config:SeerConfig", model="modeling:SeerForConditionalGeneration"),
)
