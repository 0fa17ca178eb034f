"""Molmo: overlapping crops, pooled two by two by attention, before a text of Qwen 2's shape."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ReferenceOptions, ShortName

FAMILY = Family(
    model_types=("molmo",),
    architectures=("MolmoForCausalLM",),
    short_names=(ShortName("molmo-7b", "allenai/Molmo-7B-D-0924", "molmo", "Apache-2.0", 8.0, "points at things"),),
    tested=(
        KnownCheckpoint(
            "molmo",
            "MolmoForCausalLM",
            "allenai/Molmo-7B-D-0924",
            IMAGE,
            "images stand before the text; overlapping crops; vocabulary in two parts; the variant of OLMo's text "
            "(Molmo-7B-O) is refused",
            on_gpu=True,
        ),
    ),
    definition=Definition(config="config:MolmoConfig", model="modeling:MolmoForCausalLM"),
    reference=ReferenceOptions(merges_inside=True),
    grounding=Grounding("point tags", 100),
)
