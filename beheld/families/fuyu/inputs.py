"""Fuyu: one image before the prompt, as rows of patches that each end with a newline token; an answer token follows.

Its tokenizer treats these tokens as ordinary pieces and puts a blank before every text, so this module makes an image's
ids, and the prompt is encoded separately.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ProcessError
from beheld.families.inputs import LAID_OUT, PLAIN_HOST_ONLY, EffectiveSize, FamilyInputs, ItemPlace, ProcessedItem
from beheld.inputs.media.effective_size import numbers

_MARKS = re.compile(r"\|SPEAKER\||\|NEWLINE\||<s>")
_ANSWER = "<0x04>"
_UNPADDED = ("image_unpadded_widths", "image_unpadded_heights")


def call(
    processor: Any, modality: str, item: Any, options: Mapping[str, Any], setting: str
) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    """Run the processor on one image; see families.inputs.Call.

    Raises:
        ProcessError: the image is so narrow that nothing of it remains at the model's size.
    """
    _check_shape(processor.image_processor, item, options)
    known = inspect.signature(processor._process_images).parameters
    # The older name of the patches, which newer versions return only on request.
    newer = {"return_legacy_image_output": False} if "return_legacy_image_output" in known else {}
    outputs, texts = processor._process_images([item], **options, **newer)
    patches = outputs["pixel_values"] if newer else outputs["image_patches"]
    marks = _MARKS.findall(texts[0])
    if "".join(marks) != texts[0]:
        raise ValueError("this version writes images with unknown tokens")
    unpadded = {name: outputs[name] for name in _UNPADDED}
    return {"pixel_values": patches, **unpadded}, tuple(processor.tokenizer.convert_tokens_to_ids(marks))


def _check_shape(images: Any, item: Any, options: Mapping[str, Any]) -> None:
    """Shrink what does not fit, by a factor that rounds sizes down to whole pixels."""
    most = options.get("size") or images.size
    if not options.get("do_resize", images.do_resize):
        return
    (width, height), room = item.size, (most["width"], most["height"])
    scale = min(1.0, room[0] / width, room[1] / height)
    if min(int(width * scale), int(height * scale)) == 0:
        raise ProcessError(
            f"The image of {width} x {height} pixels is so narrow that nothing is left of it when it is shrunk to "
            f"fit into {room[0]} x {room[1]}.",
            "Cut it into wider or taller parts.",
        )


def rewrite(text: str, counts: Mapping[str, int]) -> str | tuple[str | ItemPlace, ...]:
    """Put the image first, then the prompt and the answer token; a prompt without an image is unchanged."""
    if not counts.get("image"):
        return text
    return ItemPlace("image"), text + _ANSWER


def look(item: ProcessedItem) -> EffectiveSize | None:
    """Return the image's effective size; see FamilyInputs.looks."""
    (width,), (height,) = (numbers(item.outputs[name]) for name in _UNPADDED)
    return EffectiveSize(width, height)


INPUTS = FamilyInputs(
    template="fuyu/chat_template.jinja",
    call=call,
    rewrite=rewrite,
    rewrite_chat=rewrite,
    pieces=("|SPEAKER|", "|NEWLINE|", _ANSWER),
    closes=f"{_ANSWER} ends every prompt with an image, and the answer follows it",
    most={"image": 1},
    embedded={"image": LAID_OUT},
    host_only=PLAIN_HOST_ONLY | set(_UNPADDED),
    looks={"image": look},
)
