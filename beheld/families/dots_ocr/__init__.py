"""dots.ocr: a tower with rotary positions in two dimensions before Qwen2."""

from __future__ import annotations

from typing import Any

from beheld.families.family import IMAGE, Definition, Family, KnownCheckpoint, ShortName


def _placeholders(config: Any) -> dict[str, int]:
    """Drop the configuration's video token, which the model does not read."""
    return {"image": config.image_token_id}


FAMILY = Family(
    model_types=("dots_ocr",),
    architectures=("DotsOCRForCausalLM",),
    short_names=(
        ShortName("dots-ocr", "rednote-hilab/dots.ocr", "dots_ocr", "MIT", 3.0, "reads pages with their layout"),
    ),
    tested=(
        KnownCheckpoint(
            "dots_ocr",
            "DotsOCRForCausalLM",
            "rednote-hilab/dots.ocr",
            IMAGE,
            "a tower with two-axis positions before Qwen2; one-axis positions in the text",
        ),
    ),
    definition=Definition(config="config:DotsOCRConfig", model="modeling:DotsOCRForCausalLM"),
    placeholders=_placeholders,
)
