"""Intern-S1."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("interns1",),
    architectures=("InternS1ForConditionalGeneration",),
    undefined=Undefined("InternS1ForConditionalGeneration", "internlm/Intern-S1-mini", "InternVL's layout over Qwen3"),
)
