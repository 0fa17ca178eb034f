"""vLLM's modality "vision_chunk", whose images are images here."""

from __future__ import annotations

from typing import Any

import pytest

from beheld import EngineArgs
from beheld.core.errors import PromptError
from beheld.engine.setup import decide
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.tiny_media import picture

FIRST, SECOND = picture(84, 56, 1), picture(56, 84, 2)


def ask(data: dict[str, Any], count: int, **more: Any) -> Any:
    prompt = {"prompt": tiny.prompt("llava", count, 0), "multi_modal_data": data, **more}
    return pipes.shared("llava").prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def chunk(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def test_chunks_are_images_in_their_order() -> None:
    wanted = [span.item.digest for span in ask({"image": [FIRST, SECOND]}, 2).spans]
    chunks = {"vision_chunk": [chunk(FIRST), chunk(SECOND)]}
    named = ask(chunks, 2, multi_modal_uuids={"vision_chunk": ["a", "b"]})
    assert [span.item.digest for span in ask(chunks, 2).spans] == wanted
    assert [span.item.modality for span in named.spans] == ["image", "image"]
    assert [span.item.digest for span in ask({"vision_chunk": chunk(FIRST)}, 1).spans] == wanted[:1]


@pytest.mark.parametrize(
    "data",
    [
        {"vision_chunk": {"type": "video_chunk", "video_chunk": [FIRST]}},
        {"vision_chunk": FIRST},
        {"vision_chunk": [chunk(None)]},
        {"vision_chunk": chunk(FIRST), "image": SECOND},
    ],
)
def test_what_is_no_image_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PromptError) as caught:
        ask(data, 1)
    assert caught.value.param == "vision_chunk"


@pytest.mark.parametrize("data", [{"image": [FIRST]}, {"vision_chunk": [chunk(FIRST)]}])
def test_names_of_items_that_are_not_there_are_refused(data: dict[str, Any]) -> None:
    other = "image" if "vision_chunk" in data else "vision_chunk"
    with pytest.raises(PromptError) as caught:
        ask(data, 1, multi_modal_uuids={other: ["a"]})
    assert caught.value.param in ("multi_modal_uuids", "vision_chunk")


@pytest.mark.parametrize(
    ("given", "images"),
    [
        ({"image": 0, "vision_chunk": 2}, 2),
        ({"image": 3, "vision_chunk": 0}, 3),
        ({"vision_chunk": 0}, 999),
        ({"vision_chunk": 2}, 2),
    ],
)
def test_a_limit_of_chunks_is_one_of_images(given: dict[str, int], images: int) -> None:
    args = EngineArgs(str(tiny.checkpoint("llava")), limit_mm_per_prompt=given)
    assert decide(args, pipes.info("llava")).limit_per_prompt["image"] == images
