"""Granite 4 Vision: LLaVA-NeXT's tiles."""

from __future__ import annotations

from beheld.families.granite_docling.inputs import DEEPER
from beheld.families.inputs import FamilyInputs
from beheld.families.llava_next.inputs import look

INPUTS = FamilyInputs(embedded={"image": DEEPER}, looks={"image": look})
