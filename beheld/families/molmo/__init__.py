"""Molmo."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("molmo",),
    architectures=("MolmoForCausalLM",),
    undefined=Undefined("MolmoForCausalLM", "allenai/Molmo-7B-D-0924", "overlapping tiles, pooled by attention"),
)
