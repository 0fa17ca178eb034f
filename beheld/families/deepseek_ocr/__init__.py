"""DeepSeek-OCR, published under the model type of DeepSeek-VL2 but with another class: SAM and CLIP in a row."""

from __future__ import annotations

from beheld.core.grounding import Grounding
from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ShortName

FAMILY = Family(
    model_types=("deepseek_ocr",),
    architectures=("DeepseekOCRForCausalLM",),
    short_names=(
        ShortName(
            "deepseek-ocr",
            "deepseek-ai/DeepSeek-OCR",
            "deepseek_ocr",
            "MIT",
            3.3,
            "reads pages as Markdown with few tokens",
            expert_billions=2.4,
        ),
    ),
    tested=(
        KnownCheckpoint(
            "deepseek_ocr",
            "DeepseekOCRForCausalLM",
            "deepseek-ai/DeepSeek-OCR",
            IMAGE,
            "SAM and CLIP; an overview of 1024 pixels and up to six tiles of 640, other sizes by mm_processor_kwargs; "
            "experts; answers do not repeat themselves; NGramPerReqLogitsProcessor",
            on_gpu=True,
        ),
    ),
    placeholder_tokens={"image": "<image>"},
    definition=Definition(config="config:DeepseekOCRConfig", model="modeling:DeepseekOCRForCausalLM"),
    grounding=Grounding("ref det", 999),
)
