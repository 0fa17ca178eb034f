"""Kosmos 2: the BOS token and the image come before the prompt; each embedding's place has an id of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from beheld.families.inputs import FamilyInputs

_BEGIN, _START, _END = "<s>", "<image>", "</image>"


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Run the processor on one image; the ids of the embeddings' places follow that of the unknown token."""
    outputs = processor.image_processor([item], **options)
    start, end = processor.tokenizer.convert_tokens_to_ids([_START, _END])
    first = processor.tokenizer.unk_token_id + 1
    features = {"pixel_values": outputs["pixel_values"], "mark_ids": torch.tensor([[start, end]])}
    return features, (start, *range(first, first + processor.num_image_tokens), end)


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the BOS token and the image first, unless the prompt places it."""
    text = text.replace(_START + _END, "", 1).strip()
    return f"{_BEGIN}{_START}{_END} {text}" if counts.get("image") else f"{_BEGIN}{text}"


_WRITTEN = "Write the tokens of places into the prompt: `<phrase>a dog</phrase><object><patch_index_0044>...</object>`."

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
    unbuilt={
        "bboxes": _WRITTEN,
        "first_image_token_id": "Leave it out: no embedding depends on it.",
        "num_image_tokens": "Leave it out: the model makes latent_query_num embeddings.",
    },
)
