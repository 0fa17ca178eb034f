"""Pixtral: the prompt describes an image's rows; everything else comes from the processor."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(embedded={"image": LAID_OUT})
