"""BLIP-2: one image before the prompt, and the start of the text behind it.

The tower's queries, a number that processor_config.json names, take the image's places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError
from beheld.families.inputs import FamilyInputs

_IMAGE = "<image>"
_START = "</s>"


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one image; see families.inputs.Call.

    Raises:
        ModelError: the checkpoint does not say how many queries there are.
    """
    if not processor.num_query_tokens:
        raise ModelError("This BLIP-2 checkpoint does not name num_query_tokens.", "Add it to processor_config.json.")
    return processor.image_processor([item], **options), _IMAGE * processor.num_query_tokens


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """The image first, unless the prompt says where, and the start of text behind it."""
    if _IMAGE not in text:
        text = _IMAGE * counts.get("image", 0) + text
    cut = text.rfind(_IMAGE) + len(_IMAGE) if _IMAGE in text else 0
    return text[:cut] + _START + text[cut:]


INPUTS = FamilyInputs(
    template="blip2/chat_template.jinja",
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    rewritten_ends="written",
    most={"image": 1},
)
