"""Kosmos 2.5: the BOS token and the page come before the prompt; the BOS token also marks an embedding's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from beheld.families.inputs import FamilyInputs

_START, _PLACE, _END = "<image>", "<s>", "</image>"


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call."""
    outputs = processor.image_processor([item], **options)
    marks = processor.tokenizer.convert_tokens_to_ids([_START, _END])
    features = {"flattened_patches": outputs["flattened_patches"], "mark_ids": torch.tensor([marks])}
    return features, f"{_START}{_PLACE * processor.num_image_tokens}{_END}"


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the BOS token and the image first, unless the prompt places it."""
    if not counts.get("image"):
        return text
    return f"{_PLACE}{_START}{_END}{text.replace(_START + _END, '', 1)}"


INPUTS = FamilyInputs(
    placeholders={"image": _START + _END},
    template="_shared/plain.jinja",
    places={"image": (_START, _END)},
    embeds_all=frozenset(("image",)),
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    most={"image": 1},
    embedded={"image": (_START, _END)},
)
