"""H2OVL."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("h2ovl_chat",),
    architectures=("H2OVLChatModel",),
    undefined=Undefined("H2OVLChatModel", "h2oai/h2ovl-mississippi-800m", "InternViT, tiles in two passes"),
)
