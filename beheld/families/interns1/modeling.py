"""Intern-S1's model: transformers' InternVL."""

from __future__ import annotations

from transformers import InternVLForConditionalGeneration

from beheld.families.interns1.config import InternS1Config


class InternS1ForConditionalGeneration(InternVLForConditionalGeneration):
    """transformers' InternVL under the name that the repository gives it."""

    config_class = InternS1Config
