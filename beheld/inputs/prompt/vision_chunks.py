"""vLLM's modality "vision_chunk": an image, or a part of a video, for models that read both alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import PromptError
from beheld.core.media import CHUNKS


def as_images(data: Mapping[str, Any], uuids: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return multi_modal_data and multi_modal_uuids whose chunks are items of "image", in the same order.

    Raises:
        PromptError: a chunk is no image, or there are images besides, whose place among the chunks nothing says.
    """
    if CHUNKS not in data and CHUNKS not in uuids:
        return data, uuids
    if data.get("image") is not None:
        raise PromptError(
            'A prompt has either "image" or "vision_chunk".', "Give all images as one of them.", param=CHUNKS
        )
    if CHUNKS not in data or "image" in uuids:
        raise PromptError(
            'multi_modal_uuids names other items than multi_modal_data: one has "vision_chunk", the other has not.',
            'Name them in both, each as "image" or as "vision_chunk".',
            param="multi_modal_uuids",
        )
    given = data.get(CHUNKS)
    chunks = [given] if isinstance(given, Mapping) else given
    if chunks is not None and not isinstance(chunks, list | tuple):
        raise PromptError(
            f'"vision_chunk" cannot be a {type(chunks).__name__}.',
            'Give {"type": "image", "image": ...} or a list of such.',
            param=CHUNKS,
        )
    images = None if chunks is None else [_image(chunk) for chunk in chunks]
    return _renamed(data, images), _renamed(uuids, uuids[CHUNKS]) if CHUNKS in uuids else uuids


def _renamed(items: Mapping[str, Any], images: Any) -> dict[str, Any]:
    return {name: value for name, value in items.items() if name != CHUNKS} | {"image": images}


def _image(chunk: Any) -> Any:
    if isinstance(chunk, Mapping) and chunk.get("type") == "image" and chunk.get("image") is not None:
        return chunk["image"]
    kind = chunk.get("type") if isinstance(chunk, Mapping) else type(chunk).__name__
    raise PromptError(
        f'A chunk of "vision_chunk" cannot be {kind!r}.',
        'Give {"type": "image", "image": ...}; a video belongs into "video", where the model takes videos.',
        param=CHUNKS,
    )
