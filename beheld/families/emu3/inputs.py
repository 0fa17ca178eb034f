"""Emu3: every text begins with the BOS token, which its processor writes; the prompt tells an image's size."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(begins="with bos or eos", embedded={"image": LAID_OUT})
