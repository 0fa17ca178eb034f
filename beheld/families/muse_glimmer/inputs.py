"""Muse: the prompt tells the time of each of a video's frames."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(embedded={"video": LAID_OUT})
