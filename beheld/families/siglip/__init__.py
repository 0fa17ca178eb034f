"""SigLIP: vectors of texts and of images in one space."""

from __future__ import annotations

from beheld.families._shared.contrastive.config import placeholders, pools_siglip
from beheld.families.family import Family

FAMILY = Family(
    model_types=("siglip",), placeholders=placeholders, pools=pools_siglip, encodes=True, both_ways="prompt"
)
