"""PaddleOCR-VL: a tower with rotary positions before ERNIE 4.5; three-axis positions."""

from __future__ import annotations

from typing import Any

from beheld.families.family import IMAGE, Family, KnownCheckpoint, ShortName


def _placeholders(config: Any) -> dict[str, int]:
    """Drop the configuration's video token, which its processor does not read."""
    return {"image": config.image_token_id}


FAMILY = Family(
    model_types=("paddleocr_vl",),
    short_names=(
        ShortName(
            "paddleocr-vl",
            "PaddlePaddle/PaddleOCR-VL",
            "paddleocr_vl",
            "Apache-2.0",
            1.0,
            "reads parts of pages in many languages",
        ),
    ),
    tested=(
        KnownCheckpoint(
            "paddleocr_vl",
            "PaddleOCRVLForConditionalGeneration",
            "PaddlePaddle/PaddleOCR-VL",
            IMAGE,
            "three-axis positions",
        ),
    ),
    placeholders=_placeholders,
)
