"""InternVL in its publisher's layout."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("internvl_chat",),
    architectures=("InternVLChatModel",),
    undefined=Undefined("InternVLChatModel", "OpenGVLab/InternVL2-2B", "the original key names and processor"),
)
