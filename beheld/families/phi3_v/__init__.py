"""Phi-3-vision."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("phi3_v",),
    architectures=("Phi3VForCausalLM",),
    undefined=Undefined(
        "Phi3VForCausalLM",
        "microsoft/Phi-3.5-vision-instruct",
        "CLIP tiles with line separators, Phi-3; for VLM2Vec an embedding in place of an answer, and its template",
        also="TIGER-Lab/VLM2Vec-Full",
    ),
)
