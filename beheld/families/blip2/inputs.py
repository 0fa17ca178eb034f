"""BLIP-2: one image before the prompt, then the BOS token and the text.

The embeddings of the tower's queries replace the image's placeholder; processor_config.json gives their number.
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
        ModelError: the checkpoint does not give the number of queries.
    """
    if not processor.num_query_tokens:
        raise ModelError("This BLIP-2 checkpoint does not set num_query_tokens.", "Add it to processor_config.json.")
    return processor.image_processor([item], **options), _IMAGE * processor.num_query_tokens


def rewrite(text: str, counts: Mapping[str, int]) -> str:
    """Put the image first, unless the prompt places it, and the BOS token after it."""
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
