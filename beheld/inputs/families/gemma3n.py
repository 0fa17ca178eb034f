"""Gemma 3n: `<image_soft_token>` in a prompt becomes a block of embeddings between blank lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.inputs.families import Family


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], str]:
    """Run the processor on one picture; see families.Call. Older versions have no step of their own for that."""
    return processor.image_processor([item], **options), processor.full_image_sequence


FAMILY = Family(call=call)
