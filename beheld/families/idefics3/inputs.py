"""Idefics 3: prompts say how an image's tiles lie; its processor's own interface gives the rest."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(embedded={"image": LAID_OUT})
