"""Qwen3.5: prompts as Qwen3-VL's, with the time before each pair of a video's frames."""

from __future__ import annotations

from beheld.families.inputs import LAID_OUT, FamilyInputs

INPUTS = FamilyInputs(embedded={"video": LAID_OUT})
