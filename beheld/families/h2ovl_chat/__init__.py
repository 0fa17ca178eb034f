"""H2OVL-Mississippi: InternVL around Danube, a Llama or a Mistral; an image that is alone is cut twice."""

from __future__ import annotations

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint

FAMILY = Family(
    model_types=("h2ovl_chat",),
    architectures=("H2OVLChatModel",),
    tested=(
        KnownCheckpoint(
            "h2ovl_chat",
            "H2OVLChatModel",
            "h2oai/h2ovl-mississippi-800m",
            IMAGE,
            "tiles of two grids for an image that is its prompt's only one",
        ),
    ),
    definition=Definition(config="config:H2OVLChatConfig", model="modeling:H2OVLChatForConditionalGeneration"),
    placeholder_tokens={"image": "<IMG_CONTEXT>"},
)
