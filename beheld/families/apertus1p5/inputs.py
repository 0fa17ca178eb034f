"""Apertus 1.5: the prompt tells an image's size, and marks the ends of its rows."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(exact=frozenset(("pixel_values", "input_values")), embedded={"image": LAID_OUT})
