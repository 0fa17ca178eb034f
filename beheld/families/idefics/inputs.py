"""IDEFICS: an image is one token, between two others; the BOS token begins every prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import FamilyInputs

_IMAGE, _AROUND, _START = "<image>", "<fake_token_around_image>", "<s>"


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    return {"pixel_values": processor.image_processor([item], **options)}, _IMAGE


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Begin the text, and put a token before, between and after images, without spaces around them."""
    plain = text.removeprefix(_START).replace(_AROUND, "").strip(" ")
    return _START + re.sub(
        rf" *{_IMAGE}(?: *{_IMAGE})* *", lambda run: _AROUND + (_IMAGE + _AROUND) * run[0].count(_IMAGE), plain
    )


INPUTS = FamilyInputs(
    template="_shared/plain.jinja",
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    barred={"</s>": "IDEFICS sees no image after it"},
)
