"""T5Gemma 2: images as Gemma 3 has them, in the encoder's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from beheld.families.gemma3.inputs import INPUTS as GEMMA3

_IMAGE = "<start_of_image>"


def rewrite_chat(text: str, counts: Mapping[str, int]) -> str:
    """Put images first, of which a template for text writes none."""
    return _IMAGE * max(0, counts.get("image", 0) - text.count(_IMAGE)) + text


INPUTS = replace(
    GEMMA3,
    placeholders={"image": _IMAGE},
    rewrite_chat=rewrite_chat,
    template="_shared/plain.jinja",
    closes="its encoder reads the whole prompt, and the answer starts a new sequence",
)
