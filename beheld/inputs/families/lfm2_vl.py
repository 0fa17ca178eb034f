"""LFM2-VL: a picture in rows and columns of tiles between marks, which an option of the processor leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import LAID_OUT, Family


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture; see families.Call."""
    # Older versions of the processor have no attribute for it; there and here they are on.
    marks = getattr(processor, "use_image_special_tokens", True)
    outputs, texts = processor._process_images([[item]], use_image_special_tokens=marks, **options)
    return outputs, texts[0]


FAMILY = Family(call=call, embedded={"image": LAID_OUT})
