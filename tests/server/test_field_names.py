"""What an error names: the field that the client sent, and nothing of the server's own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.core.errors import ParamsError
from beheld.server.field_names import field_names_of
from beheld.server.schema import ChatRequest
from beheld.server.stream import EventStream
from tests import tiny
from tests.inputs import pipes
from tests.server.running import ENGINE, Running, data_url

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
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
    "image": {"image": "data:,"},
    "image_pil": {"image_pil": "data:,"},
    "input_image": {"image_url": "data:,"},
    "video": {"video": "data:,"},
    "input_video": {"video_url": "data:,"},
    "audio": {"audio": "data:,"},
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", [5, "x" * 600], ids=["a number", "too long"])
def test_a_wrong_name_of_a_part_is_what_is_named(running: Running, kind: str, name: Any) -> None:
    error = refused(running, [{"type": "text", "text": "a"}, {"type": kind, **PARTS[kind], "uuid": name}])
    assert error["param"] == "messages.0.content.1.uuid"
    assert error["message"].startswith("messages.0.content.1.uuid ")


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


GOOD = {"type": "image_url", "image_url": {"url": data_url(seed=4)}}
WORDS = {"type": "text", "text": "a"}
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MANY = [{"type": "image_url", "image_url": {"url": data_url(seed=seed)}} for seed in range(5)]
# Parts of the second message -> status, the place within it, what the message begins with, and its code.
ITEMS: dict[str, tuple[list[dict[str, Any]], int, str, str, str]] = {
    "broken": ([BROKEN], 400, "content.0.image_url", "image 1: ", "decode_error"),
    "the second of two": ([GOOD, WORDS, BROKEN], 400, "content.2.image_url", "image 2: ", "decode_error"),
    "not base64": (
        [{"type": "image_url", "image_url": "data:image/png;base64,?"}],
        400,
        "content.0.image_url",
        "image 1: ",
        "data_error",
    ),
    "a video behind a picture": (
        [GOOD, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
        400,
        "content.1.video_url",
        "video 1: ",
        "decode_error",
    ),
    "private": (
        [WORDS, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}],
        422,
        "content.1.image_url",
        "image 1: ",
        "fetch_error",
    ),
    "a file": (
        [GOOD, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        422,
        "content.1.image_url",
        "image 2: ",
        "fetch_error",
    ),
    "a modality that is not taken": ([WORDS, SOUND], 400, "content.1.audio_url", "This model", "prompt_error"),
    "one too many": (MANY, 400, "content.4.image_url", "There are 5 image items", "limit_error"),
    "embeddings": (
        [GOOD, {"type": "image_embeds", "image_embeds": "!"}],
        400,
        "content.1.image_embeds",
        "image 2: ",
        "decode_error",
    ),
    "embeddings of another shape": (
        [WORDS, {"type": "image_embeds", "image_embeds": {"image_embeds": "!", "image_grid_thw": "!"}}],
        400,
        "content.1.image_embeds",
        "image 1: ",
        "decode_error",
    ),
    "too large": (
        [{"type": "image_url", "image_url": {"url": data_url(1200, 1200)}}],
        413,
        "content.0.image_url",
        "image 1: ",
        "limit_error",
    ),
}
SYSTEM = {"role": "system", "content": "s"}


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    """A server that takes small pictures only, and trusts its clients with the rest."""
    engine = ENGINE | {"media_limits": {"max_pixels": 1_000_000}}
    found = Running(engine=engine, trust_templates=True, trust_processor_options=True)
    yield found
    found.close()


def only_what_a_client_can_do(error: dict[str, Any]) -> None:
    """Nothing of Python's or of the command line stands in what the client shall do itself."""
    own = error["remedy"].split("The operator may")[0]
    assert error["remedy"]
    assert not re.search(r"BEHELD_|max_model_len|_mm_|mm_|max_logprobs|=True|=False|pathlib", own)
    assert "multi_modal_data" not in error["message"]


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_that_cannot_be_used_is_named_by_its_place(bounded: Running, name: str) -> None:
    parts, status, place, begin, code = ITEMS[name]
    messages = [SYSTEM, {"role": "user", "content": parts}]
    answers = [bounded.post(CHAT, {"messages": messages, "max_tokens": 1, "stream": s}) for s in (False, True)]
    for answer in (*answers, bounded.post("/tokenize", {"messages": messages})):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, f"messages.1.{place}", code), error
        assert error["message"].startswith(begin), error
        only_what_a_client_can_do(error)


HI = {"messages": [{"role": "user", "content": "hi"}]}
LONG = [{"role": "user", "content": "x " * 5000}]
CALL = {"function": {"name": "a", "arguments": "[" * 70 + "]" * 70}}
FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": LONG}, "messages", "input prompt. The operator may raise max_model_len."),
    ("/tokenize", {"messages": LONG}, "messages", "Please reduce the length"),
    ("/tokenize", {"prompt": "x" * 500_000}, "prompt", "Please reduce the length"),
    ("/detokenize", {"tokens": [10**6]}, "tokens", "another value"),
    (COMPLETE, {"prompt": "x " * 5000}, "prompt", "Please reduce the length"),
    (COMPLETE, {"prompt": ["a", "x " * 5000]}, "prompt", "Please reduce the length"),
    (COMPLETE, {"prompt": [10**6]}, "prompt", "another value"),
    (COMPLETE, {"prompt": ""}, "prompt", "at least one"),
    (COMPLETE, {"prompt": "<|vision_start|><|image_pad|><|vision_end|>"}, "prompt", "/v1/chat/completions"),
    (COMPLETE, {"prompt": "a", "logprobs": 99}, "logprobs", "The operator may raise max_logprobs; -1 allows all."),
    (COMPLETE, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
     "response_format", ""),
    (CHAT, {"messages": [SYSTEM, {"role": "us er", "content": "x"}]}, "messages.1.role", "Use a word"),
    (CHAT, {"messages": [{"role": "im_start", "content": "x"}]}, "messages.0.role", "another role"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
     "messages.0.tool_calls.0.function.arguments", ""),
    (CHAT, HI | {"max_completion_tokens": 2, "min_tokens": 5}, "min_tokens", ""),
    (COMPLETE, {"prompt": "a", "max_completion_tokens": 2, "min_tokens": 5}, "min_tokens", ""),
    (COMPLETE, {"prompt": "a", "max_completion_tokens": 0}, "max_completion_tokens", ""),
    (COMPLETE, {"prompt": "a", "max_completion_tokens": 2, "max_tokens": 2}, "max_completion_tokens", "one of them"),
    (COMPLETE, {"prompt": "a", "logprobs": True}, "logprobs", "whole number"),
    (CHAT, HI | {"logprobs": True, "top_logprobs": 99}, "top_logprobs", "Request fewer."),
    (CHAT, HI | {"tool_choice": "auto"}, "tool_choice", "Send tools"),
    (CHAT, HI | {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "to false"),
    (CHAT, HI | {"chat_template": "x"}, "chat_template", "operator may"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "remedy"), FIELDS)
def test_the_field_is_the_clients_own(
    running: Running, path: str, body: dict[str, Any], param: str, remedy: str
) -> None:
    answer = running.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert remedy in error["remedy"]
    only_what_a_client_can_do(error)


def test_options_and_templates_of_the_request_are_what_is_named(bounded: Running) -> None:
    messages = [{"role": "user", "content": [GOOD, {**GOOD, "max_pixels": -1}]}]
    shared = {"messages": [{"role": "user", "content": [GOOD]}], "mm_processor_kwargs": {"max_pixels": -1}}
    silent = {"messages": shared["messages"], "chat_template": "{{ messages[0].role }}"}
    for body, param, remedy in (
        ({"messages": messages}, "messages.0.content.1", "another value"),
        (shared, "mm_processor_kwargs", "another value"),
        (HI | {"chat_template": "{{ 1 / 0 }}"}, "chat_template", "another template"),
        (silent, "chat_template", "another template"),
    ):
        error = bounded.post(CHAT, {**body, "max_tokens": 1}).json()["error"]
        assert error["param"] == param, error
        assert remedy in error["remedy"]


def test_a_completion_takes_a_chats_names(running: Running) -> None:
    asked = {"prompt": "a", "temperature": 0, "ignore_eos": True}
    found = running.post(COMPLETE, asked | {"max_completion_tokens": 3, "logprobs": False}).json()
    assert found["usage"]["completion_tokens"] == 3
    assert found["choices"][0]["logprobs"] is None
    assert "warnings" not in found


def test_a_parameter_has_the_clients_name_in_words_too(running: Running) -> None:
    error = running.post(CHAT, HI | {"max_completion_tokens": 2, "min_tokens": 5}).json()["error"]
    assert "greater than max_completion_tokens (2)" in error["message"]
    error = running.post(CHAT, HI | {"max_tokens": 2, "min_tokens": 5}).json()["error"]
    assert "greater than max_tokens (2)" in error["message"]
    error = running.post(CHAT, HI | {"logprobs": True, "top_logprobs": 99}).json()["error"]
    assert error["message"].startswith("top_logprobs=99 exceeds max_logprobs=20.")


def test_an_error_in_the_middle_of_a_stream_has_the_clients_names_too() -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": []}
        raise ParamsError("max_tokens is wrong.", "Leave max_tokens out.", param="max_tokens")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    names = field_names_of(ChatRequest.model_validate(HI))
    asyncio.run(EventStream(chunks(), lambda error: None, names)({"type": "http"}, receive, send))
    error = json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]
    assert error["param"] == "max_completion_tokens"
    assert error["message"] == "max_completion_tokens is wrong. Leave max_completion_tokens out."


def test_a_prompt_that_is_too_long_has_openais_code(running: Running) -> None:
    """Programs shorten a conversation when they see it."""
    for path, body in ((CHAT, {"messages": LONG}), (COMPLETE, {"prompt": "x" * 500_000})):
        assert running.post(path, body).json()["error"]["code"] == "context_length_exceeded"


def test_every_error_has_a_word_and_a_remedy(running: Running, locked: Running) -> None:
    key = {"Authorization": "Bearer key-one"}
    for answer, code, remedy in (
        (running.get(CHAT), "method_not_allowed", "POST"),
        (running.get("/none"), "not_found", "/openapi.json"),
        (locked.get("/v1/models"), "invalid_api_key", "Bearer"),
        (locked.get("/none", headers=key), "not_found", "/openapi.json"),
        (running.post_text(CHAT, "{"), "invalid_request", "JSON"),
        (running.post(CHAT, {"messages": HI["messages"], "user": "x" * (9 << 20)}), "too_large", "smaller"),
    ):
        error = answer.json()["error"]
        assert error["code"] == code, error
        assert remedy in error["remedy"], error
        assert error["message"].endswith(error["remedy"])


def test_items_have_one_number_in_errors_and_receipts(running: Running, tmp_path: Path) -> None:
    """Both count the items of a modality, whatever else the request has."""
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
    data = pipes.write_video(tmp_path / "v.mp4", frames).read_bytes()
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}
    messages = [{"role": "user", "content": [GOOD, clip, {**GOOD, "image_url": {"url": data_url(seed=8)}}]}]
    answer = running.post(CHAT, {"messages": messages, "max_tokens": 1}).json()
    assert [(m["item"], m["modality"], m["index"]) for m in answer["media"]] == [
        ("image 1", "image", 0),
        ("video 1", "video", 0),
        ("image 2", "image", 1),
    ]
    messages[0]["content"][2] = BROKEN
    answer = running.post(CHAT, {"messages": messages, "max_tokens": 1}).json()
    assert answer["error"]["message"].startswith("image 2: ")


def test_a_request_says_how_its_videos_are_read(running: Running, bounded: Running, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (8, 56, 56, 3), dtype=np.uint8)
    data = pipes.write_video(tmp_path / "v.mp4", frames).read_bytes()
    clip = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}
    reading = {"media_io_kwargs": {"video": {"num_frames": 4}, "image": {}}, "max_tokens": 1}
    for part, count in ((clip, 4), ({**clip, "num_frames": 6}, 6)):
        asked = reading | {"messages": [{"role": "user", "content": [part]}]}
        assert bounded.post(CHAT, asked).json()["media"][0]["used"]["frames"] == count
    del asked["messages"][0]["content"][0]["num_frames"]
    for wrong in ({"video": {"num_frames": "4"}}, {"video": {"x": 1}}, {"audio": {"num_frames": 4}}):
        answer = bounded.post(CHAT, asked | {"media_io_kwargs": wrong})
        assert answer.status_code == 400, answer.text
    refused = running.post(CHAT, HI | reading)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "media_io_kwargs")


def test_a_request_says_what_is_behind_its_images(running: Running, bounded: Running) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (84, 56), (200, 10, 10, 0)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    asked = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    lost = [
        bounded.post(CHAT, asked | {"media_io_kwargs": {"image": image}}).json()["media"][0]["lost"]
        for image in ({}, {"rgba_background_color": [0, 9, 0]})
    ]
    shown = [f"transparency was flattened onto {colour}" for colour in ("white", "the colour [0, 9, 0]")]
    assert lost == [[words] for words in shown]
    answer = bounded.post(CHAT, asked | {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 256]}}})
    assert (answer.status_code, "three whole numbers" in answer.text) == (400, True)
    refused = running.post(CHAT, asked | {"media_io_kwargs": {"image": {"rgba_background_color": [0, 9, 0]}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "media_io_kwargs")


def test_response_format_text_is_no_grammar(running: Running) -> None:
    """Clients send it with everything."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    body = HI | {"tools": [tool], "tool_choice": "required", "max_tokens": 1, "response_format": {"type": "text"}}
    answer = running.post(CHAT, body)
    assert answer.status_code == 200, answer.text
