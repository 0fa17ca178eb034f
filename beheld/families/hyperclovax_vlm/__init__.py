"""HyperCLOVA X SEED Vision."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("hyperclovax_vlm",),
    architectures=("HCXVisionForCausalLM",),
    undefined=Undefined(
        "HCXVisionForCausalLM", "naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B", "an abstractor after SigLIP"
    ),
)
