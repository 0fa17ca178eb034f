"""Fields that cannot change an answer are accepted, and the answer names them; a strict server refuses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import openai
import pytest

from beheld.core.errors import ParamsError
from beheld.server.errors import ANTHROPIC, DIALECT, RESPONSES, Dialect
from beheld.server.stream import EventStream
from tests.server.running import ENGINE, Running, data_url, source_of
from tests.server.test_forms import TALK
from tests.server.test_said import HI, user

CHAT = "/v1/chat/completions"
FIELDS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "user": "u",
    "verbosity": "low",
}


def low(detail: str = "low") -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": data_url(), "detail": detail}})


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """A server that refuses fields without effect."""
    found = Running(strict_fields=True)
    yield found
    found.idle()
    found.close()


def counted(running: Running) -> dict[str, float]:
    """The counter's values by field."""
    lines = running.get("/metrics").text.splitlines()
    begin = 'beheld_fields_without_effect_total{field="'
    pairs = [line.removeprefix(begin).split('"} ') for line in lines if line.startswith(begin)]
    return {name: float(value) for name, value in pairs}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_changes_nothing_and_is_named(running: Running, strict: Running, name: str) -> None:
    body = HI | {"max_tokens": 8, "temperature": 0}
    plain, before = running.post(CHAT, body), counted(running).get(name, 0)
    answer = running.post(CHAT, body | {name: FIELDS[name]})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["choices"] == plain.json()["choices"]
    (warning,) = found["warnings"]
    assert warning["param"] == name
    assert warning["message"]
    assert answer.headers["x-without-effect"] == name
    assert counted(running)[name] == before + 1
    assert "warnings" not in plain.json()
    assert "x-without-effect" not in plain.headers
    assert "warnings" not in running.post(CHAT, body | {name: None}).json()
    refused = strict.post(CHAT, body | {name: FIELDS[name]})
    if name == "user":
        assert (refused.status_code, "warnings" in refused.json()) == (200, False)
    else:
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_stream_names_them_once(running: Running) -> None:
    body = HI | {"max_tokens": 4, "stream": True, "metadata": {"a": "b"}, "store": True}
    answer = running.post(CHAT, body)
    chunks = [json.loads(event[6:]) for event in answer.text.split("\n\n") if event and "[DONE]" not in event]
    assert [[warning["param"] for warning in chunk.get("warnings", ())] for chunk in chunks] == [
        ["metadata", "store"],
        *[[]] * (len(chunks) - 1),
    ]
    assert answer.headers["x-without-effect"] == "metadata, store"
    whole = running.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "metadata": {"a": "b"}})
    assert [warning["param"] for warning in whole.json()["warnings"]] == ["metadata"]


def test_the_detail_of_images(running: Running, strict: Running) -> None:
    found = running.post(CHAT, low() | {"max_tokens": 1}).json()
    assert [warning["param"] for warning in found["warnings"]] == ["detail"]
    for detail in ("auto", "high", "original"):
        assert "warnings" not in running.post(CHAT, low(detail) | {"max_tokens": 1}).json()
    error = strict.post(CHAT, low()).json()["error"]
    assert error["param"] == "messages.0.content.0.image_url.detail"
    assert "'auto' or 'high'" in error["remedy"]
    assert running.post(CHAT, low("tiny")).status_code == 400


def test_what_messages_bring_along(running: Running) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "id": "1", "timestamp": 5, "provider_specific_fields": {}}
    found = running.post(CHAT, {"messages": [message], "max_tokens": 1}).json()
    assert {warning["param"] for warning in found["warnings"]} == {
        *("cache_control", "id", "timestamp", "provider_specific_fields")
    }


def test_an_answer_as_a_client_kept_it_is_taken_back(running: Running) -> None:
    own = {"provider_specific_fields": None}
    function = {"name": "look", "arguments": "{}", "provider_specific_fields": {"a": 1}}
    answer = {
        **{"role": "assistant", "content": None, "refusal": None, "images": [], "thinking_blocks": None, **own},
        **{"reasoning": "Hm.", "reasoning_content": "Hm.", "reasoning_details": [{"type": "x"}]},
        "tool_calls": [{"id": "1", "index": 0, "type": "function", "function": function, **own}],
    }
    talk = [*HI["messages"], answer, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    found = running.post(CHAT, {"messages": talk, "max_tokens": 1})
    assert found.status_code == 200, found.text
    warned = {warning["param"] for warning in found.json()["warnings"]}
    assert warned == {"provider_specific_fields", "reasoning_details", "thinking_blocks"}
    refused = running.post(CHAT, {"messages": [{**answer, "images": ["x"]}], "max_tokens": 1})
    assert refused.status_code == 400


@pytest.mark.parametrize("name", ["best_of", "functions", "web_search_options", "surprise"])
def test_what_would_change_an_answer_is_refused(running: Running, name: str) -> None:
    error = running.post(CHAT, HI | {name: 5}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_field")


def test_the_effort_reaches_a_template_that_has_a_switch() -> None:
    template = TALK + "{{ reasoning_effort }}"
    for strict in (False, True):
        running = Running("qwen2", ENGINE | {"chat_template": template}, strict_fields=strict)
        try:
            tokens = []
            for effort in ("low", "minimal"):
                body = HI | {"max_tokens": 1, "reasoning_effort": effort}
                given = HI | {"max_tokens": 1, "chat_template_kwargs": {"reasoning_effort": effort}}
                answers = [running.post(CHAT, sent).json() for sent in (body, given)]
                assert "warnings" not in answers[0]
                assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
                tokens.append(answers[0]["usage"]["prompt_tokens"])
                sent = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": effort}}
                found = running.post("/v1/responses", sent).json()
                assert (found["usage"]["input_tokens"], found["reasoning"]["effort"]) == (tokens[-1], effort)
            counted = running.post("/v1/messages", HI | {"max_tokens": 1, "output_config": {"effort": "low"}}).json()[
                "usage"
            ]
            assert counted["input_tokens"] + counted["cache_read_input_tokens"] == tokens[0]
            assert tokens[0] != tokens[1]
        finally:
            running.close()


def test_a_variable_that_the_template_does_not_read_is_named(running: Running, strict: Running) -> None:
    asked = {"max_tokens": 1, "chat_template_kwargs": {"enable_thinkin": False}}
    for path, body in (
        (CHAT, HI | asked),
        ("/v1/messages", HI | asked),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "chat_template_kwargs": {"enable_thinkin": False}}),
    ):
        (warning,) = running.post(path, body).json()["warnings"]
        assert warning["param"] == "chat_template_kwargs"
        assert "'enable_thinkin'" in warning["message"]
        assert strict.post(path, body).json()["error"]["param"] == "chat_template_kwargs"
    # One that the server reads itself.
    body = HI | {"max_tokens": 1, "chat_template_kwargs": {"force_nonempty_content": True}}
    assert "warnings" not in running.post(CHAT, body).json()


def test_a_bound_of_calls_that_a_server_makes_is_told(running: Running) -> None:
    body = {"input": "x", "max_output_tokens": 1}
    said = running.post("/v1/responses", body | {"max_tool_calls": 1}).json()
    assert [note["param"] for note in said["warnings"]] == ["max_tool_calls"]
    assert "warnings" not in running.post("/v1/responses", body | {"max_tool_calls": None}).json()


def test_each_route_names_the_effort_as_its_client_does(running: Running, strict: Running) -> None:
    for path, body, param in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/messages", HI | {"max_tokens": 1, "output_config": {"effort": "low"}}, "output_config.effort"),
    ):
        assert [warning["param"] for warning in running.post(path, body).json()["warnings"]] == [param]
        assert strict.post(path, body).json()["error"]["param"] == param
    source = {"type": "image", "source": source_of(data_url()), "cache_control": {"type": "ephemeral"}}
    marked = {"messages": [{"role": "user", "content": [source]}], "max_tokens": 1}
    assert strict.post("/v1/messages", marked).json()["error"]["param"] == "messages.0.content.0.cache_control"


# ---------------------------------------------------------------------- errors in streams


def broken(dialect: Dialect) -> bytes:
    """A stream that fails after its first event."""

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "response.created" if dialect is RESPONSES else "ping"}
        raise ParamsError("It is wrong.", "Leave it out.", param="temperature")

    sent = b""

    async def send(message: Any) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def run() -> None:
        DIALECT.set(dialect)
        await EventStream(chunks(), lambda error: None)({"type": "http"}, receive, send)

    asyncio.run(run())
    return sent


def answering(content: bytes) -> httpx.Response:
    return httpx.Response(200, content=content, headers={"content-type": "text/event-stream"})


def test_clients_raise_an_error_in_the_middle_of_a_stream() -> None:
    transport = httpx.MockTransport(lambda request: answering(broken(RESPONSES)))
    with openai.OpenAI(api_key="x", http_client=httpx.Client(transport=transport), max_retries=0) as client:
        stream = client.responses.create(model="x", input="x", stream=True)
        with pytest.raises(openai.APIError, match="It is wrong"):
            list(stream)
    last = broken(ANTHROPIC).split(b"\n\n")[-2].split(b"\n")
    assert last[0] == b"event: error"
    found = json.loads(last[1].removeprefix(b"data: "))
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert b"[DONE]" not in broken(ANTHROPIC) + broken(RESPONSES)


def test_notes_of_an_agent_in_its_messages_are_accepted_and_named_once(running: Running) -> None:
    """Templates read no such field; a misspelt one, and one that would change an answer, are refused."""
    message = {"role": "user", "content": "x", "extra_field": "0", "created_at": 5}
    found = running.post(CHAT, {"messages": [message, message], "max_tokens": 1})
    warnings = [(warning["param"], warning["message"]) for warning in found.json()["warnings"]]
    assert warnings == [(name, "No chat template reads it here.") for name in ("extra_field", "created_at")]
    plain = {"role": "user", "content": "x"}
    assert running.post("/tokenize", {"messages": [message]}).json() == (
        running.post("/tokenize", {"messages": [plain]}).json()
    )
    for name, value, words in (
        *(("contents", "y", "Did you mean 'content'?"), ("tool_call", [], "Did you mean 'tool_calls'?")),
        ("prefix", True, "Set continue_final_message."),
    ):
        error = running.post(CHAT, {"messages": [plain | {name: value}], "max_tokens": 1}).json()["error"]
        assert (error["param"], error["code"], error["remedy"]) == (f"messages.0.{name}", "unknown_field", words)
    many = plain | {f"note{number}": 0 for number in range(100)}
    assert running.post(CHAT, {"messages": [many], "max_tokens": 1}).status_code == 400
    strict = Running(strict_fields=True)
    try:
        error = strict.post(CHAT, {"messages": [message], "max_tokens": 1}).json()["error"]
        assert (error["param"], error["code"]) == ("messages.0.extra_field", "unknown_field")
    finally:
        strict.close()


def test_names_that_clients_make_up_are_in_the_warnings_alone(running: Running) -> None:
    """A header takes no such text, and a counter for each would be kept for good."""
    message = {"role": "user", "content": "x", "备注": "y", "a\r\nset-cookie: b": 1}
    body = {"messages": [message], "max_tokens": 1}
    made = running.post(CHAT, body)
    assert made.status_code == 200
    assert [one["param"] for one in made.json()["warnings"]] == ["备注", "a\r\nset-cookie: b"]
    streamed = running.post(CHAT, body | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert made.headers["x-without-effect"] == streamed.headers["x-without-effect"] == "unknown_fields"
    figures = running.get("/metrics").text
    assert 'field="unknown_fields"' in figures
    assert "备" not in figures
    assert "cookie" not in figures


def test_a_client_that_chooses_an_engine_is_told_that_it_does_not(running: Running) -> None:
    """No engine answers otherwise than another, and the one whose cache has the prompt answers sooner."""
    found = running.post(CHAT, HI | {"max_tokens": 1}, headers={"x-data-parallel-rank": "1"}).json()
    assert [warning["param"] for warning in found["warnings"]] == ["X-data-parallel-rank"]
