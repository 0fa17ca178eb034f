"""LLaVA-NeXT-Video: LLaVA-NeXT's images, and frames of one size; its checkpoints include a chat template."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs
from beheld.families.llava_next.inputs import look

INPUTS = FamilyInputs(looks={"image": look})
