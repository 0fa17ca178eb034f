"""LLaVA-NeXT-Video: LLaVA-NeXT's pictures, and frames of one size; its checkpoints bring a chat template."""

from __future__ import annotations

from beheld.inputs.families import Family
from beheld.inputs.families.llava_next import look

FAMILY = Family(looks={"image": look})
