"""DeepSeek-OCR, published under the model type of DeepSeek-VL2 but with another class."""

from __future__ import annotations

from beheld.families.family import Family, Undefined

FAMILY = Family(
    model_types=("deepseek_ocr",),
    architectures=("DeepseekOCRForCausalLM",),
    undefined=Undefined(
        "DeepseekOCRForCausalLM", "deepseek-ai/DeepSeek-OCR", "SAM and CLIP towers in a row, a projector, experts"
    ),
)
