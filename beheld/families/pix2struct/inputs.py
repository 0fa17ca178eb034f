"""Pix2Struct: an image as many patches as fit; a question is drawn above it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import read_json
from beheld.core.errors import ProcessError, PromptError
from beheld.families._shared.one_image.inputs import seen
from beheld.families.inputs import FamilyInputs

_START = "<pad>"


def features(images: Any, item: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the patches of an image, without those that only fill up; an image without a question is read as it is.

    Raises:
        ProcessError: there is a question, and the checkpoint answers none.
    """
    if options.get("header_text") and not images.is_vqa:
        raise ProcessError(
            "This checkpoint draws no header_text above an image, as those for questions do.", "Leave it out."
        )
    asks = {"is_vqa": False} if not options.get("header_text") else {}
    made = images([item], **{**options, **asks, "return_tensors": "pt"})
    count = int(made["attention_mask"].sum())
    return {name: made[name][:, :count] for name in ("flattened_patches", "attention_mask")}


def states(outputs: Mapping[str, Any], folder: Path) -> int:
    """Return the number of states, one for each patch; see FamilyInputs."""
    return int(outputs["attention_mask"].shape[1])


def variant(folder: Path) -> FamilyInputs:
    """Return the inputs of a checkpoint: one that answers questions takes no text with the image."""
    if not (read_json(folder / "preprocessor_config.json") or _within(folder)).get("is_vqa"):
        return INPUTS

    def rewrite(text: str, counts: Mapping[str, int]) -> str:
        words = re.sub(rf"(\s|{re.escape(_START)})+", "", text)
        if words:
            raise PromptError(
                "This checkpoint reads its question from the image, above which it is drawn, and takes no other text.",
                'Leave the prompt empty, and send "mm_processor_kwargs": {"header_text": the question}.',
            )
        return _START

    return replace(INPUTS, rewrite=rewrite, rewrite_chat=rewrite)


def _within(folder: Path) -> Mapping[str, Any]:
    """The image processor's part of a processor's file."""
    found: Mapping[str, Any] = read_json(folder / "processor_config.json").get("image_processor") or {}
    return found


INPUTS = replace(seen(_START, features, states), variant=variant)
