"""PP-Chart2Table: its processor leaves the prompt as it is, so the template writes one token for each embedding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import FamilyInputs

_TOKEN = "<imgpad>"
# Pixels of a side for one embedding: a patch of 16, and two convolutions that halve.
_STEP = 64


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    outputs = processor.image_processor([item], **options)
    height, width = outputs["pixel_values"].shape[-2:]
    return outputs, _TOKEN * ((height // _STEP) * (width // _STEP))


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Make one placeholder of the many that the template writes for an image."""
    return re.sub(f"(?:{_TOKEN})+", _TOKEN, text)


INPUTS = FamilyInputs(placeholders={"image": f"<img>{_TOKEN}</img>"}, call=call, rewrite=rewrite, rewrite_chat=rewrite)
