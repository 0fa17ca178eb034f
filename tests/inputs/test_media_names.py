"""Names of media: an item that came with a name is found by it while it is cached, and only by those with its salt."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from beheld.core.errors import DecodeError, PromptError
from beheld.inputs.pipeline import Chat, RequestOrder
from tests import tiny
from tests.inputs import pipes
from tests.tiny_media import picture

FIRST, SECOND = picture(84, 56, 31), picture(56, 84, 32)


def ask(images: Any, names: Any, count: int = 1, **more: Any) -> Any:
    prompt = {
        "prompt": tiny.prompt("llava", count, 0),
        "multi_modal_data": {"image": images},
        "multi_modal_uuids": {"image": names},
        **more,
    }
    return pipes.shared("llava").prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def digests(request: Any) -> list[bytes]:
    return [span.item.digest for span in request.spans]


def test_a_name_stands_for_the_item_that_it_came_with() -> None:
    whole = ask([FIRST, SECOND], ["names first", "names second"], 2)
    assert digests(ask([None, None], ["names second", "names first"], 2)) == digests(whole)[::-1]
    assert digests(ask(None, "names first")) == digests(whole)[:1]
    mixed = ask([None, SECOND], ["names first", None], 2)
    assert digests(mixed) == digests(whole)
    receipt = mixed.receipts[0]
    assert (receipt.cached, receipt.given["source"], receipt.given["uuid"]) == (True, "uuid", "names first")


def test_the_latest_item_has_the_name() -> None:
    ask([FIRST], ["names moved"])
    second = ask([SECOND], ["names moved"])
    assert digests(ask(None, "names moved")) == digests(second)


def test_a_name_is_that_of_callers_with_the_same_salt() -> None:
    ask([FIRST], ["names salted"], cache_salt="mine")
    assert ask(None, "names salted", cache_salt="mine").spans
    for more in ({}, {"cache_salt": "other"}):
        with pytest.raises(DecodeError, match="Cache miss for image at index 0 but data is not provided"):
            ask(None, "names salted", **more)


def test_what_has_neither_content_nor_name_is_refused() -> None:
    with pytest.raises(DecodeError, match="is None, and has no name"):
        ask([None, FIRST], [None, "names first"], 2)
    with pytest.raises(DecodeError, match="Cache miss for image at index 1"):
        ask([FIRST, None], ["names here", "names nowhere"], 2)
    with pytest.raises(PromptError, match="holds 1 names for 2"):
        ask([FIRST, SECOND], ["names first"], 2)


def ask_of_video(videos: Any, name: str, **options: Any) -> Any:
    prompt = {
        "prompt": tiny.prompt("qwen2_vl", 0, 1),
        "multi_modal_data": {"video": videos},
        "multi_modal_uuids": {"video": [name]},
        "mm_processor_kwargs": options,
    }
    return pipes.shared("qwen2_vl").prepare(RequestOrder(prompt, pipes.ONE_TOKEN, request_id="0"))


def test_a_video_is_found_by_its_name_with_the_same_choice_of_frames(tmp_path: Path) -> None:
    film = pipes.write_video(tmp_path / "v.mp4", tiny.frames(12)).read_bytes()
    four, all_frames = ask_of_video([film], "names film", num_frames=4), ask_of_video([film], "names film")
    assert digests(four) != digests(all_frames)
    assert digests(ask_of_video(None, "names film", num_frames=4)) == digests(four)
    assert digests(ask_of_video(None, "names film")) == digests(all_frames)
    with pytest.raises(DecodeError, match="Cache miss for video"):
        ask_of_video(None, "names film", num_frames=2)
    shown = ask_of_video([tiny.frames(8)], "names frames")
    assert digests(ask_of_video(None, "names frames")) == digests(shown)


def test_the_name_of_a_document_stands_for_none_of_its_pages() -> None:
    pages = [picture(84, 56, seed).convert("RGB") for seed in (41, 42)]
    file = io.BytesIO()
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:])
    part = {"type": "file", "file": file.getvalue(), "uuid": "names contract"}

    def chat(given: dict[str, Any]) -> Any:
        talk = Chat([{"role": "user", "content": [given, {"type": "text", "text": "Read."}]}])
        return pipes.shared("qwen2_vl").prepare(RequestOrder(talk, pipes.ONE_TOKEN, request_id="0"))

    assert len(chat(part).spans) == 2
    with pytest.raises(DecodeError, match="Cache miss for image"):
        chat({"type": "image_url", "image_url": None, "uuid": "names contract"})
