"""dots.ocr."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("dots_ocr",),
    architectures=("DotsOCRForCausalLM",),
    undefined=Undefined("DotsOCRForCausalLM", "rednote-hilab/dots.ocr", "a custom tower before Qwen2"),
)
