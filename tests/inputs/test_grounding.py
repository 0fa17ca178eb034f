"""What requests say of their images for grounding: a box is found again in the tensors that the tower gets."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from beheld.core.errors import ParamsError
from beheld.core.request import Request
from beheld.inputs.pipeline import Chat, InputPipeline, RequestOrder
from beheld.text.grounding import read
from tests import tiny
from tests.inputs import pipes
from tests.long import LONG


def ask(pipe: InputPipeline, *media: dict[str, Any]) -> Request:
    messages = [{"role": "user", "content": [*media, {"type": "text", "text": "Where?"}]}]
    return pipe.prepare(RequestOrder(Chat(messages), pipes.ONE_TOKEN, request_id="0", grounding=True))


def seen_by_the_tower(request: Request) -> np.ndarray:
    """The resized image (height, width), of a processor that packs patches of 14 pixels in squares of two by two."""
    (span,) = request.spans
    (_, rows, columns) = np.asarray(span.item.layout["image_grid_thw"]).reshape(-1)
    patches = span.item.features["pixel_values"].float().numpy()
    side = 14
    # (rows / 2, columns / 2, 2, 2, colours, frames, 14, 14)
    packed = patches.reshape(rows // 2, columns // 2, 2, 2, 3, -1, side, side)[:, :, :, :, 0, 0]
    return packed.transpose(0, 2, 4, 1, 3, 5).reshape(rows * side, columns * side)


@settings(max_examples=8 if LONG else 3, deadline=None)
@given(st.data())
def test_a_box_in_the_towers_pixels_is_the_box_that_was_drawn(data: st.DataObject) -> None:
    """For a model that answers in pixels of the resized image, whatever the size, the orientation and the place."""
    width, height = data.draw(st.integers(60, 500)), data.draw(st.integers(60, 500))
    left, top = data.draw(st.integers(0, width - 30)), data.draw(st.integers(0, height - 30))
    box = (left, top, data.draw(st.integers(left + 30, width)), data.draw(st.integers(top + 30, height)))
    image = Image.new("RGB", (width, height))
    image.paste((255, 255, 255), box)
    exif = image.getexif()
    exif[0x0112] = data.draw(st.integers(1, 8))
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    request = ask(pipes.shared("qwen2_5_vl"), {"type": "image", "image": file.getvalue()})
    assert request.grounding is not None
    seen = seen_by_the_tower(request)
    assert (seen.shape[1], seen.shape[0]) == request.grounding.images[0].seen
    bright = seen > (seen.max() + seen.min()) / 2
    (rows,), (columns,) = np.nonzero(bright.any(axis=1)), np.nonzero(bright.any(axis=0))
    answer = f'[{{"bbox_2d": [{columns[0]}, {rows[0]}, {columns[-1] + 1}, {rows[-1] + 1}], "label": "box"}}]'
    (found,) = read(answer, request.grounding)
    assert found.box is not None
    for value, true, step in zip(found.box, box, (*found.step, *found.step), strict=True):
        assert abs(value - true) <= 1 + step


def test_the_size_is_that_of_the_users_image_whatever_form_it_has() -> None:
    pipe = pipes.make("qwen2_vl")
    picture = tiny.picture(84, 56, 1)
    exif = Image.Exif()
    exif[0x0112] = 8
    turned = pipes.encoded(picture, "JPEG", exif=exif)
    for form, orientation in (
        (picture, 1),
        (np.asarray(picture), 1),
        (pipes.encoded(picture), 1),
        (turned, 8),
        (Image.open(io.BytesIO(turned)), 8),
    ):
        for _ in range(2):
            # The second time it comes from the cache.
            request = ask(pipe, {"type": "image", "image": form})
            assert request.grounding is not None
            (image,) = request.grounding.images
            assert (image.width, image.height, image.orientation) == (84, 56, orientation)


@pytest.mark.parametrize(
    ("family", "media", "words"),
    [
        ("llava", ["image"], r"LlavaForConditionalGeneration \(.*\) has no known notation"),
        ("qwen2_vl", [], "holds no image"),
        ("qwen2_vl", ["image", "image"], "does not write which of them it points at"),
        ("qwen2_vl", ["image", "video"], "does not write which of them it points at"),
        ("qwen2_vl", ["video"], "holds no image"),
    ],
)
def test_what_cannot_be_located_is_refused(family: str, media: list[str], words: str) -> None:
    given = {"image": tiny.picture(56, 56, 1), "video": tiny.frames(4, 0, 56, 56)}
    with pytest.raises(ParamsError, match=words) as caught:
        ask(pipes.shared(family), *({"type": kind, kind: given[kind]} for kind in media))
    assert caught.value.param == "grounding"


def test_a_notation_that_names_images_takes_several() -> None:
    request = ask(
        pipes.shared("molmo2"),
        {"type": "image", "image": tiny.picture(56, 84, 1)},
        {"type": "image", "image": tiny.picture(84, 56, 2)},
    )
    assert request.grounding is not None
    text = '<points coords="1 1 500 500\t2 2 500 500">eyes</points>'
    assert [(found.image, found.points) for found in read(text, request.grounding)] == [
        ("image 1", ((28.0, 42.0),)),
        ("image 2", ((42.0, 28.0),)),
    ]


def test_embeddings_have_no_pixels() -> None:
    import torch

    pipe, width = pipes.shared("qwen2_vl"), pipes.info("qwen2_vl").hidden_size
    embeds = {"image_embeds": torch.zeros(4, width), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    prompt = {"prompt": tiny.prompt("qwen2_vl", 1, 0, "Hi"), "multi_modal_data": {"image": embeds}}
    with pytest.raises(ParamsError, match="its size is unknown"):
        pipe.prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0", grounding=True))
