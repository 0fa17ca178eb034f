"""Parts of chats under every name that clients give them: the model sees one and the same."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beheld.server.chat_messages import message_of
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.pooling_schema import ScoredContent
from beheld.server.schema import Message
from tests.inputs import pipes
from tests.server.running import Running, data_url

CHAT = "/v1/chat/completions"
PICTURE = data_url(seed=3)
BASE64 = PICTURE.partition("base64,")[2]
WORDS = {"type": "text", "text": "What is it?"}


def asked(running: Running, *parts: dict[str, Any]) -> tuple[int, str, list[str]]:
    """Length of the prompt, answer, and digests of the items."""
    messages = [{"role": "user", "content": list(parts)}]
    answer = running.post(CHAT, {"messages": messages, "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    items = [item["digest"] for item in found.get("media", ())]
    return found["usage"]["prompt_tokens"], found["choices"][0]["message"]["content"], items


def test_an_image_by_any_name(running: Running) -> None:
    expected = asked(running, {"type": "image_url", "image_url": {"url": PICTURE}}, WORDS)
    assert len(expected[2]) == 1
    for part in (
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": {"url": PICTURE}},
        {"image_url": {"url": PICTURE}},
        {"image": PICTURE},
        {"type": "image", "url": PICTURE},
        {"type": "image", "base64": BASE64},
        {"type": "image", "data": BASE64, "uuid": "a name"},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "input_image", "image_url": PICTURE, "detail": "high"},
        {"type": "input_image", "image_url": {"url": PICTURE}},
    ):
        assert asked(running, part, WORDS) == expected, part
    for words in ({"type": "input_text", "text": "What is it?"}, {"text": "What is it?"}):
        assert asked(running, {"type": "image", "image": PICTURE}, words) == expected


def test_a_video_by_any_name(running: Running, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
    data = pipes.write_video(tmp_path / "v.mp4", frames).read_bytes()
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    expected = asked(running, {"type": "video_url", "video_url": {"url": url}}, WORDS)
    for part in (
        {"type": "video", "video": url},
        {"type": "video", "url": url},
        {"type": "input_video", "video_url": url},
        {"type": "input_video", "video_url": {"url": url}},
    ):
        assert asked(running, part, WORDS) == expected, part


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image"}, "image"),
        ({"type": "image_pil"}, "image_pil"),
        ({"type": "image_pil", "image_pil": 5}, "image_pil"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "video", "video": ["a", "b"]}, "video"),
        ({"type": "image", "path": "/etc/passwd"}, "path"),
        ({"type": "image", "image": PICTURE, "detail": "best"}, "detail"),
        ({"type": "thinking"}, "thinking"),
        # Two things without a type: one would be dropped.
        ({"text": "What?", "image_url": {"url": PICTURE}}, ""),
        ({"picture": PICTURE}, ""),
        ({"type": "image", "url": PICTURE, "base64": BASE64}, "base64"),
        ({"type": "image", "image": PICTURE, "path": "/etc/passwd"}, "path"),
        ({"type": "video", "url": PICTURE, "data": BASE64}, "data"),
        ({"type": "input_file", "file_data": PICTURE, "file_url": "https://example.org/a.png"}, "file_url"),
    ],
)
def test_what_is_wrong_is_named(running: Running, part: dict[str, Any], param: str) -> None:
    answer = running.post(CHAT, {"messages": [{"role": "user", "content": [WORDS, part]}], "max_tokens": 1})
    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["param"].startswith(f"messages.0.content.1.{param}".rstrip("."))


def test_reasoning_in_parts_is_the_messages() -> None:
    parts = [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "So."}]
    made = message_of(Message.model_validate({"role": "assistant", "content": parts}), 0, ServerOptions())
    assert (made["reasoning_content"], made["content"]) == ("Hm", [{"type": "text", "text": "So."}])


def test_reasoning_in_parts_of_a_user_is_refused(running: Running) -> None:
    answer = running.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "Hm"}]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.content")


def test_reasoning_in_a_side_of_a_pair_is_refused() -> None:
    side = ScoredContent.model_validate({"content": [{"type": "thinking", "thinking": "Hm"}]})
    with pytest.raises(HttpError) as found:
        message_of(side, 0, ServerOptions())
    assert found.value.status == 400


def test_marks_of_caches_on_items_are_told(running: Running) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    expected = asked(running, {"type": "image_url", "image_url": {"url": PICTURE}}, WORDS)
    for part in (
        {"type": "image_url", "image_url": {"url": PICTURE}, **mark},
        {"type": "image", "image": PICTURE, **mark},
        {"type": "input_file", "file_data": PICTURE, "filename": "a.png", **mark},
    ):
        messages = [{"role": "user", "content": [part, WORDS]}]
        answer = running.post(CHAT, {"messages": messages, "max_tokens": 4, "temperature": 0}).json()
        assert [one["param"] for one in answer["warnings"]] == ["cache_control"]
        assert answer["usage"]["prompt_tokens"] == expected[0]
        assert [item["digest"] for item in answer["media"]] == expected[2]
