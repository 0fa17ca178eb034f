"""/v2/chat says what the chat route says of the same conversation, in Cohere's form, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from beheld.server import chat as chat_module
from beheld.server import cohere_chat
from beheld.server.cohere_schema import CohereChatRequest
from beheld.server.json_pieces import LongJson
from beheld.server.notes import Notes
from beheld.server.schema import ChatRequest
from tests.server.conftest import kept
from tests.server.running import ENGINE, Running, data_url
from tests.server.test_forms import OPENED

ROUTES = ("/v2/chat", "/cohere/v2/chat")
RENDER = "/cohere/v2/chat/render"
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hi."}]
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["here", "there"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


def ask(running: Running, **more: Any) -> dict[str, Any]:
    answer = running.post(ROUTES[0], {"messages": HELLO} | GREEDY | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(running: Running, **more: Any) -> list[dict[str, Any]]:
    answer = running.post(ROUTES[0], {"messages": HELLO, "stream": True} | GREEDY | more)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line[len("data: ") :] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    found: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    names = [line[len("event: ") :] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in found]
    return found


def text_of(found: dict[str, Any]) -> str:
    (block,) = found["message"]["content"]
    assert block["type"] == "text"
    return str(block["text"])


def chat(running: Running, messages: Any, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = running.post(CHAT, GREEDY | {"messages": messages} | more).json()
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_is_the_chats(running: Running, route: str) -> None:
    found = running.post(route, {"messages": HELLO} | GREEDY).json()
    expected = chat(running, HELLO)
    assert text_of(found) == expected["choices"][0]["message"]["content"]
    assert found["finish_reason"] == "MAX_TOKENS"
    counts = {"input_tokens": expected["usage"]["prompt_tokens"], "output_tokens": 8}
    assert found["usage"]["tokens"] == found["usage"]["billed_units"] == counts


def test_a_stream_has_the_events_of_a_message(running: Running) -> None:
    made = events(running)
    kinds = [event["type"] for event in made]
    assert kinds[:2] == ["message-start", "content-start"]
    assert kinds[-2:] == ["content-end", "message-end"]
    assert set(kinds[2:-2]) == {"content-delta"}
    assert made[0]["id"]
    text = "".join(event["delta"]["message"]["content"]["text"] for event in made[2:-2])
    assert text == text_of(ask(running))
    assert made[-1]["delta"]["usage"]["tokens"]["output_tokens"] == 8
    assert made[-1]["delta"]["finish_reason"] == "MAX_TOKENS"


def test_images_and_earlier_turns_are_those_of_chat(running: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url()}}
    words = {"type": "text", "text": "What is it?"}
    said = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [words, image]},
        {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    plain = [*said[:2], {"role": "assistant", "content": "A dog."}, {"role": "user", "content": "Sure?"}]
    found = ask(running, messages=[{**said[0], "role": "developer"}, *said[1:]])
    expected = chat(running, plain)
    assert text_of(found) == expected["choices"][0]["message"]["content"]
    assert found["usage"]["tokens"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert len(found["media"]) == 1


def test_names_of_sampling_are_coheres(running: Running) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 20}
    expected = chat(running, HELLO, top_k=5, top_p=0.9, **drawn)
    assert text_of(ask(running, k=5, p=0.9, **drawn)) == expected["choices"][0]["message"]["content"]
    text = text_of(ask(running))
    stopped = ask(running, stop_sequences=[text[2:4]])
    assert stopped["finish_reason"] == "STOP_SEQUENCE"
    assert text.startswith(text_of(stopped))


def test_log_probabilities_name_tokens(running: Running) -> None:
    expected = chat(running, HELLO, logprobs=True, return_token_ids=True)["choices"][0]
    for entries in (
        ask(running, logprobs=True)["logprobs"],
        [event["logprobs"] for event in events(running, logprobs=True) if "logprobs" in event],
    ):
        assert [one for entry in entries for one in entry["token_ids"]] == expected["token_ids"]
        told = [one for entry in entries for one in entry["logprobs"]]
        assert told == pytest.approx([one["logprob"] for one in expected["logprobs"]["content"]], abs=1e-4)


def told(entries: list[dict[str, Any]]) -> tuple[list[int], int]:
    """The tokens that have log-probabilities, and how many of these there are."""
    return [one for entry in entries for one in entry["token_ids"]], sum(len(entry["logprobs"]) for entry in entries)


def test_log_probabilities_of_calls_come_with_them(running: Running) -> None:
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": "REQUIRED", "max_tokens": 60}
    plain, found = ask(running, **more), ask(running, logprobs=True, **more)
    ids, count = told(found["logprobs"])
    assert len(ids) == count == found["usage"]["tokens"]["output_tokens"]
    assert [call["function"] for call in found["message"]["tool_calls"]] == [
        call["function"] for call in plain["message"]["tool_calls"]
    ]
    assert found["message"]["content"] == []
    made = events(running, logprobs=True, **more)
    assert told([event["logprobs"] for event in made if "logprobs" in event]) == (ids, count)
    kinds = [event["type"] for event in made]
    assert kinds.count("tool-call-start") == kinds.count("tool-call-end") == len(found["message"]["tool_calls"])
    assert not any(kind.startswith("content") for kind in kinds)


def entries_of(*tokens: int) -> dict[str, Any]:
    """What a choice has of tokens."""
    return {
        "logprobs": {"content": [{"token": str(one), "logprob": -1.0} for one in tokens]},
        "token_ids": list(tokens),
    }


def test_log_probabilities_of_a_whole_answer_are_written_in_pieces() -> None:
    async def made() -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "message-start", "id": "x", "delta": {}}
        blocks = cohere_chat._Events()
        for number in range(600):
            for event in blocks.push({"delta": {"content": "a"}, **entries_of(number)}):
                yield event
        for event in blocks.finish():
            yield event

    written = LongJson(asyncio.run(cohere_chat.fold(made())))
    pieces = list(written.pieces())
    assert len(pieces) > 2
    assert told(json.loads(b"".join(pieces))["logprobs"]) == (list(range(600)), 600)


def test_log_probabilities_count() -> None:
    body = ChatRequest.model_validate({"messages": HELLO, "max_tokens": 1 << 20, "logprobs": True})
    assert chat_module.columns_bytes(body, 1 << 20) == 0
    assert chat_module.columns_bytes(cohere_chat.counted(body), 1 << 20) > 500 << 20
    streamed = body.model_copy(update={"stream": True})
    assert chat_module.columns_bytes(cohere_chat.counted(streamed), 1 << 20) == 0


def test_log_probabilities_open_no_blocks() -> None:
    called = [{"index": 0, "id": "c", "function": {"name": "look", "arguments": ""}}]
    deltas: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, entries_of(1)),
        ({"reasoning_content": "a"}, entries_of(2, 3)),
        ({}, entries_of(4)),
        ({"reasoning_content": "b"}, entries_of(5)),
        ({"content": "c"}, {"logprobs": None}),
        ({"tool_calls": called}, entries_of(6)),
        ({}, entries_of(7)),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, entries_of(8)),
    ]
    blocks = cohere_chat._Events()
    made = [event for delta, entries in deltas for event in blocks.push({"delta": delta, **entries})]
    made += blocks.finish()
    shown = [(event["type"], event["logprobs"]["token_ids"] if "logprobs" in event else []) for event in made]
    assert shown == [
        ("content-start", []),
        ("content-delta", [1, 2, 3]),
        ("content-delta", [4]),
        ("content-delta", [5]),
        ("content-end", []),
        ("content-start", []),
        ("content-delta", []),
        ("content-end", []),
        ("tool-call-start", [6]),
        ("tool-call-delta", [7]),
        ("tool-call-delta", [8]),
        ("tool-call-end", []),
    ]


def test_log_probabilities_of_an_answer_without_text_have_a_block() -> None:
    blocks = cohere_chat._Events()
    assert list(blocks.push({"delta": {}, **entries_of(1)})) == []
    kinds = [event["type"] for event in blocks.finish()]
    assert kinds == ["content-start", "content-delta", "content-end"]


def test_log_probabilities_of_reasoning_stay_in_its_block() -> None:
    with kept(Running("qwen2", ENGINE | OPENED, reasoning_parser="think")) as reasoning:
        made = events(reasoning, logprobs=True)
        kinds = [event["delta"]["message"]["content"]["type"] for event in made if event["type"] == "content-start"]
        assert kinds == ["thinking"]
        ids, count = told([event["logprobs"] for event in made if "logprobs" in event])
        assert len(ids) == count == made[-1]["delta"]["usage"]["tokens"]["output_tokens"]
        (block,) = ask(reasoning, logprobs=True)["message"]["content"]
        assert block["type"] == "thinking"


def test_tools_are_called_and_answered(running: Running) -> None:
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": "REQUIRED", "max_tokens": 200}
    found = ask(running, **more)
    # The tiny model may call until its tokens end.
    calls = found["message"]["tool_calls"]
    call = calls[0]
    assert found["finish_reason"] in ("TOOL_CALL", "MAX_TOKENS")
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"])["place"] in ("here", "there")
    made = events(running, **more)
    kinds = [event["type"] for event in made]
    assert kinds.count("tool-call-start") == kinds.count("tool-call-end") == len(calls)
    for number, each in enumerate(calls):
        pieces = [
            event["delta"]["message"]["tool_calls"]["function"]["arguments"]
            for event in made
            if event["type"] == "tool-call-delta" and event["index"] == number
        ]
        assert "".join(pieces) == each["function"]["arguments"]
    document = {"type": "document", "document": {"id": "d", "data": {"found": "a stone"}}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": [document]}
    said = [*HELLO, {"role": "assistant", "content": [], "tool_plan": "I look.", "tool_calls": [call]}, result]
    plain = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": '{"id": "d", "data": {"found": "a stone"}}'},
    ]
    again = ask(running, messages=said, tools=[TOOL], tool_choice="NONE")
    expected = chat(running, plain, tools=[TOOL], tool_choice="none")
    assert again["usage"]["tokens"]["input_tokens"] == expected["usage"]["prompt_tokens"]


def test_documents_stand_in_the_message_where_the_template_has_no_place(running: Running) -> None:
    documents = ["A stone.", {"id": "d1", "data": {"title": "T"}}]
    found = ask(running, documents=documents, safety_mode="STRICT")
    text = 'Document 1: A stone.\n\nDocument 2: {"id": "d1", "data": {"title": "T"}}\n\nSay hi.'
    expected = chat(running, [{"role": "user", "content": text}])
    assert found["usage"]["tokens"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert {warning["param"] for warning in found["warnings"]} == {"documents", "safety_mode"}


def test_an_answer_follows_a_schema(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for name in ("json_schema", "schema"):
        found = ask(running, response_format={"type": "json_object", name: schema}, max_tokens=40)
        assert json.loads(text_of(found))["a"] in (1, 2)


def described(values: int, letters: int = 0) -> dict[str, Any]:
    """A tool with so many values in its parameters, and so many letters in one of them."""
    parameters = {"type": "object", "enum": [0] * values, "title": "x" * letters}
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [described(1 << 15)]}, "tools"),
        ({"tools": [described(1, (1 << 20) + 1)]}, "tools"),
        # With the field that says strict it is too large.
        ({"tools": [described((1 << 15) - 16)], "strict_tools": True}, "tools"),
        ({"documents": [{"data": {"a": [0] * (1 << 15)}}]}, "documents.0.data"),
        ({"documents": ["x"], "messages": [{"role": "user", "content": [IMAGE] * 4096}]}, "messages.0.content"),
    ],
)
def test_what_is_too_large_is_refused_by_its_name(running: Running, more: dict[str, Any], param: str) -> None:
    answer = running.post(ROUTES[0], {"messages": HELLO} | GREEDY | more)
    assert (answer.status_code, answer.json()["param"]) == (400, param), answer.text[:300]


def test_the_servers_own_variable_needs_no_place(running: Running) -> None:
    given = {f"v{number}": 0 for number in range(128)}
    body = CohereChatRequest.model_validate(
        {"messages": HELLO, "chat_template_kwargs": given, "thinking": {"type": "enabled"}} | GREEDY
    )
    made = cohere_chat.asked(body, Notes(), template="enable_thinking", bounded=False).body
    assert made.chat_template_kwargs == {"enable_thinking": True, **given}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0"),
        ({"model": None}, "model"),
        ({"model": "other"}, "model"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"top_k": 3}, "top_k"),
        ({"p": 7.0}, "p"),
        ({"k": -5}, "k"),
        ({"response_format": {"type": "json_object", "schema": {"type": "none"}}}, "response_format"),
    ],
)
def test_errors_are_in_coheres_form(running: Running, more: dict[str, Any], param: str) -> None:
    answer = running.post(ROUTES[0], {"messages": HELLO} | GREEDY | more)
    assert answer.status_code in (400, 404)
    body = answer.json()
    assert "error" not in body
    assert body["message"]
    assert body["id"] == answer.headers["x-request-id"]
    assert body["param"] == param


def render(running: Running, **more: Any) -> dict[str, Any]:
    answer = running.post(RENDER, {"messages": HELLO} | GREEDY | more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_is_rendered_is_answered_as_the_chat_is(running: Running) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 4, "k": 5, "max_tokens": 20}
    made = render(running, stop_sequences=["END"], **drawn)
    assert made["sampling_params"]["temperature"] == 0.9
    assert made["sampling_params"]["stop"] == ["END"]
    expected = ask(running, logprobs=True, **drawn)
    answer = running.post(GENERATE, made).json()
    told_ids, _ = told(expected["logprobs"])
    assert answer["choices"][0]["token_ids"] == told_ids
    counted = running.post("/tokenize", {"messages": HELLO}).json()
    assert made["token_ids"] == counted["tokens"]


def test_a_rendered_schema_is_followed(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    more = {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 40}
    made = render(running, **more)
    answer = running.post(GENERATE, made | {"output_mode": "text"}).json()
    assert answer["choices"][0]["text"] == text_of(ask(running, **more))


def test_what_is_rendered_streams_with_its_salt(running: Running) -> None:
    made = render(running, stream=True, cache_salt="s", priority=0)
    assert {name: made[name] for name in ("stream", "cache_salt", "priority", "model")} == {
        **{"stream": True, "cache_salt": "s", "priority": 0},
        "model": "tiny",
    }
    assert running.post(GENERATE, made).headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}, "messages.0.content.1"),
        ({"model": "other"}, "model"),
        ({"p": 7.0}, "p"),
        ({"tools": [TOOL], "tool_choice": "REQUIRED"}, "tool_choice"),
    ],
)
def test_what_is_not_rendered_has_an_error_in_coheres_form(running: Running, more: dict[str, Any], param: str) -> None:
    answer = running.post(RENDER, {"messages": HELLO} | GREEDY | more)
    assert answer.status_code in (400, 404)
    body = answer.json()
    assert (body["param"], body["id"]) == (param, answer.headers["x-request-id"])
    assert body["remedy"]


def test_reasoning_before_a_schema_is_not_rendered() -> None:
    form = {"type": "json_object", "schema": {"type": "object"}}
    with kept(Running("qwen2", ENGINE | OPENED, reasoning_parser="think")) as reasoning:
        assert render(reasoning)["token_ids"]
        answer = reasoning.post(RENDER, {"messages": HELLO, "response_format": form} | GREEDY)
        assert (answer.status_code, answer.json()["param"]) == (400, "response_format")
