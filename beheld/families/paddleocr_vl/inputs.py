"""PaddleOCR-VL: each image between two delimiters."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(placeholders={"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"})
