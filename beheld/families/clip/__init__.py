"""CLIP: vectors of texts and of images in one space."""

from __future__ import annotations

from beheld.families._shared.contrastive.config import placeholders, pools_clip
from beheld.families.family import Family

FAMILY = Family(model_types=("clip",), placeholders=placeholders, pools=pools_clip, encodes=True, both_ways="prompt")
