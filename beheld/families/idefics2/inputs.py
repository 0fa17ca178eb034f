"""Idefics 2: marks around an image, of which two in a row are one, and a blank between a mark and a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from beheld.families.inputs import LAID_OUT, FamilyInputs

_MARK, _IMAGE = "<fake_token_around_image>", "<image>"
_TILES = 5


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    outputs = processor.image_processor([[item]], **options)
    splits = options.get("do_image_splitting", processor.image_processor.do_image_splitting)
    embeds = processor.image_token * processor.image_seq_len
    marked = f"{embeds}{processor.fake_image_token}"
    return {name: outputs[name] for name in ("pixel_values", "pixel_attention_mask")}, (
        marked * (_TILES - 1) + embeds if splits else embeds
    )


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the marks around images as the processor does."""
    marked = text.replace(_IMAGE, f"{_MARK}{_IMAGE}{_MARK}").replace(_MARK + _MARK, _MARK)
    return re.sub(rf"{_MARK}(?=[^\s<])", f"{_MARK} ", marked)


INPUTS = FamilyInputs(call=call, rewrite=rewrite, rewrite_chat=rewrite, embedded={"image": LAID_OUT})
