"""GLM-OCR: prompts like GLM-4V's."""

from __future__ import annotations

from beheld.families.glm4v.inputs import INPUTS

__all__ = ["INPUTS"]
