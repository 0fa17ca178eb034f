"""LLaVA-1.5: one `<image>` per image, and the plain USER/ASSISTANT dialogue of its language model."""

from __future__ import annotations

from beheld.families.inputs import FamilyInputs

INPUTS = FamilyInputs(template="llava/chat_template.jinja")
