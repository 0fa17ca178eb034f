"""Encoders of images before decoders of text: what is written continues the prompt, such as `<s_docvqa>`."""

from __future__ import annotations

from pathlib import Path

from beheld.families._shared.seeing.inputs import seen
from beheld.families.vision_encoder_decoder import first_token


def first(folder: Path) -> int:
    """Return the token that starts every answer."""
    from transformers import AutoConfig

    return first_token(AutoConfig.from_pretrained(str(folder)))


INPUTS = seen(first)
