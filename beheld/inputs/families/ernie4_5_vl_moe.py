"""ERNIE 4.5 VL: numbered pictures and videos, whose placeholders prompts also write in another form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import LAID_OUT, Family

_SPELLINGS = {"<|image@placeholder|>": "<|IMAGE_PLACEHOLDER|>", "<|video@placeholder|>": "<|VIDEO_PLACEHOLDER|>"}


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """The text with the placeholders that the repository's own code reads as those that the tokenizer knows."""
    for written, known in _SPELLINGS.items():
        text = text.replace(written, known)
    return text


def frame_rate(part: Any) -> float:
    """The rate at which the processor samples, since frames that come without times were chosen by somebody."""
    return float(part.fps)


FAMILY = Family(
    markers={
        "image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "video": "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
    },
    rewrite=rewrite,
    embedded={"video": LAID_OUT},
    frame_rate=frame_rate,
)
