"""What an error names: the field that the client sent, and nothing of the server's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.server.running import Running, data_url

CHAT = "/v1/chat/completions"
SOUND = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}


def refused(running: Running, content: Any) -> dict[str, Any]:
    answer = running.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


PARTS: dict[str, dict[str, Any]] = {
    "image_url": {"image_url": {"url": "data:,"}},
    "video_url": {"video_url": {"url": "data:,"}},
    "audio_url": {"audio_url": {"url": "data:,"}},
    "input_audio": {"input_audio": {"data": "AAAA", "format": "wav"}},
    "image_embeds": {"image_embeds": "AAAA"},
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", [5, "x" * 600], ids=["a number", "too long"])
def test_a_wrong_name_of_a_part_is_what_is_named(running: Running, kind: str, name: Any) -> None:
    error = refused(running, [{"type": "text", "text": "a"}, {"type": kind, **PARTS[kind], "uuid": name}])
    assert error["param"] == "messages.0.content.1.uuid"
    assert error["message"].startswith("messages.0.content.1.uuid: ")


@pytest.mark.parametrize("kind", [*PARTS, "text"])
def test_an_unknown_field_of_a_part_stands_where_it_was_sent(running: Running, kind: str) -> None:
    error = refused(running, [{"type": kind, **PARTS.get(kind, {"text": "a"}), "colour": "x"}])
    assert (error["param"], error["code"]) == ("messages.0.content.0.colour", "unknown_field")


def test_a_field_within_a_parts_object_keeps_its_path(running: Running) -> None:
    error = refused(running, [{"type": "image_url", "image_url": {"url": "data:,", "detail": 5}}])
    assert error["param"] == "messages.0.content.0.image_url.detail"
    error = refused(running, [{"type": "image_url", "image_url": {"urls": "data:,"}}])
    assert error["param"] == "messages.0.content.0.image_url.urls"
    assert refused(running, [{"type": "text", "text": 5}])["param"] == "messages.0.content.0.text"


def test_77_no_error_tells_where_the_models_files_lie(running: Running) -> None:
    many = [{"type": "image_url", "image_url": {"url": data_url(seed=seed)}} for seed in range(5)]
    for content in ([SOUND], [{"type": "text", "text": "a"}, SOUND], many):
        message = refused(running, content)["message"]
        assert str(tiny.checkpoint("qwen2_vl")) not in message
        assert "/" not in message


def test_an_item_that_cannot_be_used_is_named_by_its_place(running: Running) -> None:
    good = {"type": "image_url", "image_url": {"url": data_url(seed=4)}}
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for messages, param in (
        ([{"role": "user", "content": [bad]}], "messages.0.content.0"),
        (
            [{"role": "user", "content": [good]}, {"role": "user", "content": [{"type": "text", "text": "a"}, bad]}],
            "messages.1.content.1",
        ),
    ):
        for stream in (False, True):
            answer = running.post(CHAT, {"messages": messages, "max_tokens": 1, "stream": stream})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
