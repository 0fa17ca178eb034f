"""What is known of a request's images, so that the places in its answer can be given in their pixels."""

from __future__ import annotations

from collections.abc import Sequence

from beheld.core.config import ModelInfo
from beheld.core.errors import ParamsError
from beheld.core.grounding import AnswerGrounding, GroundedImage
from beheld.core.media import MediaReceipt


def places_of(info: ModelInfo, receipts: Sequence[MediaReceipt], prompt: str) -> AnswerGrounding:
    """Return how to read the places in an answer.

    Args:
        info: the model, which has a notation.
        receipts: of the request's images.
        prompt: its text.

    Raises:
        ParamsError: the size of an image is unknown, as given or as the model sees it.
    """
    assert info.grounding is not None
    images = tuple(
        _image(receipt, known_as_seen=not info.grounding.grid)
        for receipt in sorted(receipts, key=lambda receipt: receipt.index)
    )
    return AnswerGrounding(
        info.grounding, images, info.reasoning_formats, any(word in prompt for word in info.grounding.traced_by)
    )


def _image(receipt: MediaReceipt, *, known_as_seen: bool) -> GroundedImage:
    given, used = receipt.given, receipt.used
    if not {"width", "height"} <= given.keys():
        raise ParamsError(
            f"{receipt.item}: its size is unknown, so places in it cannot be given in its pixels.",
            "Send the image itself, not its embeddings.",
            param="grounding",
        )
    seen = (used["width"], used["height"]) if {"width", "height"} <= used.keys() else None
    if known_as_seen and seen is None:
        raise ParamsError(
            f"{receipt.item}: the size that the model sees of it is unknown, and its answers count in its pixels.",
            "Leave grounding out.",
            param="grounding",
        )
    return GroundedImage(given["width"], given["height"], used.get("exif_orientation", 1), seen)
