"""/v1/messages: Anthropic's own client gets what it expects, and what it says means what chat's same words mean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import anthropic
import pytest

from beheld.server.chat import ChunkHead
from beheld.server.messages import Asked, Prompted, asked, events, fold
from beheld.server.messages_schema import MessagesRequest
from beheld.server.notes import Notes
from beheld.server.read import checked
from beheld.server.schema import ChatRequest
from tests.server.running import ENGINE, Running, data_url, request_bytes, source_of, talk
from tests.server.test_forms import TALK

MESSAGES = "/v1/messages"
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
HI: Any = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": name, "description": "Look.", "input_schema": SCHEMA} for name in ("weather", "tides")]


def client_of(running: Running, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, max_retries=0, **{"api_key": "x", **options})


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(running) as found:
        yield found
    running.idle()


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server whose template can switch reasoning, and shows tools and calls."""
    end = "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    template = TALK + "{% if tools %}{{ tools | tojson }}{% endif %}" + end
    options: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think"}
    found = Running("qwen2", ENGINE | {"chat_template": template}, **options)
    yield found
    found.idle()
    found.close()


def pictured(*urls: str) -> Any:
    blocks = [{"type": "image", "source": source_of(url)} for url in urls]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": "Compare."}]}]


def test_pictures_are_answered_as_chat_answers_them(client: anthropic.Anthropic, running: Running) -> None:
    urls = [data_url(seed=1), data_url(56, 84, seed=2)]
    whole = client.messages.create(messages=pictured(*urls), system="Be short.", **GREEDY)
    messages = [{"role": "system", "content": "Be short."}, *talk("Compare.", *urls)]
    chat = running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0}).json()
    assert [block.text for block in whole.content if block.type == "text"] == [chat["choices"][0]["message"]["content"]]
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("max_tokens", None, "assistant")
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == 12
    assert [item["given"]["width"] for item in whole.model_extra["media"]] == [84, 56]  # type: ignore[index]
    counted = client.messages.count_tokens(model="tiny", messages=pictured(*urls), system="Be short.")
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_stream_has_anthropics_events_and_says_what_the_whole_says(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=HI, **GREEDY)
    with client.messages.stream(messages=HI, **GREEDY) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 12)
    counts = [found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0) for found in (final, whole)]
    assert counts[0] == counts[1]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_wire_has_named_events_a_ping_and_no_done(running: Running) -> None:
    body = {"messages": HI, "max_tokens": 2, "stream": True}
    answer = running.post(MESSAGES, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in answer.text.split("\n\n") if event]
    for name, data in events:
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert events[1] == ["event: ping", 'data: {"type":"ping"}']
    assert events[-1][0] == "event: message_stop"


def test_a_stop_sequence_ends_and_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(messages=HI, **GREEDY).content[0].text  # type: ignore[union-attr]
    stop = text[len(text) // 2 :][:2]
    found = client.messages.create(messages=HI, stop_sequences=[stop], **GREEDY)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_the_last_words_of_the_assistant_go_on(client: anthropic.Anthropic, running: Running) -> None:
    messages: Any = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    found = client.messages.create(messages=messages, **GREEDY)
    plain = [*HI, {"role": "assistant", "content": "It is"}]
    body = {"messages": plain, "continue_final_message": True, "max_tokens": 12, "temperature": 0}
    said = running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert found.content[0].text == said  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "tides"}, {"type": "any"}])
def test_a_tool_is_called_and_its_result_taken(thinking: Running, choice: Any) -> None:
    with client_of(thinking) as client:
        choice["disable_parallel_tool_use"] = True
        options: Any = {**GREEDY, "max_tokens": 200, "tools": TOOLS, "tool_choice": choice}
        whole = client.messages.create(messages=HI, **options)
        (call,) = whole.content
        assert call.type == "tool_use"
        assert call.name in ({"tides"} if "name" in choice else {"weather", "tides"})
        assert call.input["place"] in ("Oslo", "Rome")
        assert whole.stop_reason == "tool_use"
        with client.messages.stream(messages=HI, **options) as stream:
            (streamed,) = stream.get_final_message().content
        assert (streamed.name, streamed.input) == (call.name, call.input)  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
        later: Any = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(messages=later, tools=TOOLS, **GREEDY).usage.output_tokens


def test_reasoning_becomes_a_block_and_can_be_switched(thinking: Running) -> None:
    with client_of(thinking) as client:
        on = client.messages.create(messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}, **GREEDY)
        form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        off = client.messages.create(messages=HI, thinking={"type": "disabled"}, output_config=form, **GREEDY)
        unsaid = client.messages.create(messages=HI, output_config=form, **GREEDY)
        hidden: Any = {"type": "adaptive", "display": "omitted"}
        assert client.messages.create(messages=HI, thinking=hidden, **GREEDY).content == []
        with client.messages.stream(messages=HI, thinking={"type": "adaptive"}, **GREEDY) as stream:
            (streamed,) = stream.get_final_message().content
        (thought,) = on.content
        assert thought.type == streamed.type == "thinking"
        assert thought.thinking == streamed.thinking != ""
        assert [block.type for block in off.content] == [block.type for block in unsaid.content] == ["text"]
        assert "warnings" not in (off.model_extra or {})
        # The marks are several tokens of this tokenizer.
        assert [warning["param"] for warning in (on.model_extra or {})["warnings"]] == ["thinking.budget_tokens"]
        again: Any = [*HI, {"role": "assistant", "content": on.content}, *HI]
        assert client.messages.create(messages=again, **GREEDY).usage.output_tokens


def test_a_schema_is_followed(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(messages=HI, output_config=form, **{**GREEDY, "max_tokens": 60})
    assert json.loads(found.content[0].text)["place"] in ("Oslo", "Rome")  # type: ignore[union-attr]


def test_what_changes_nothing_is_told(client: anthropic.Anthropic) -> None:
    marked: Any = [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]
    found = client.messages.create(
        messages=[{"role": "user", "content": marked}], metadata={"user_id": "u"}, service_tier="auto", **GREEDY
    )
    told = {warning["param"] for warning in found.model_extra["warnings"]}  # type: ignore[index]
    assert told == {"cache_control", "metadata", "service_tier"}


BAD_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eHh4"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}, BAD_IMAGE]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences must not hold"),
        ({"system": 5}, "system", "text or a list"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "x", "input_schema": {}}]},
            "tools.0.type",
            "none of the type 'web_search_20250305'",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "unknown"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages.0.content.0",
            "'tool_result'",
        ),
        ({"messages": [*HI, {"role": "user", "content": ["x"]}]}, "messages.1.content.0", "object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "assistant", "content": [BAD_IMAGE]}, *HI]}, "messages.0.content.0", "cannot stand"),
        ({"messages": [{"role": "user", "content": [BAD_IMAGE]}], "system": "x"}, "messages.0.content.0", "image 1"),
        ({"messages": [*HI, {"role": "user", "content": [RESULT]}]}, "messages.1.content.0.content.1", "image 1"),
    ],
)
def test_a_refusal_has_anthropics_form_and_the_clients_names(
    running: Running, body: dict[str, Any], param: str, words: str
) -> None:
    answer = running.post(MESSAGES, {"messages": HI, "max_tokens": 2, **body})
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert found["error"]["param"] == param, found
    assert words in found["error"]["message"]
    assert found["request_id"] == answer.headers["x-request-id"]


def test_the_client_knows_every_kind_of_refusal(client: anthropic.Anthropic, locked: Running) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=HI, **{**GREEDY, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
        client.messages.create(messages=[{"role": "user", "content": "x" * 9000}], **GREEDY)
    with client_of(locked, api_key="key-one") as right, client_of(locked, api_key="wrong") as wrong:
        assert right.messages.create(messages=HI, **GREEDY).content
        with pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(messages=HI, **GREEDY)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with client_of(locked, api_key=None, auth_token="key-two") as bearer:
        assert bearer.messages.create(messages=HI, **GREEDY).content


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["x-api-key: key-one"], b"200"),
        (["x-api-key: key-one", "Authorization: Bearer key-one"], b"200"),
        (["x-api-key: key-one", "Authorization: Bearer key-two"], b"401"),
        (["x-api-key: key-one", "Authorization: Digest x"], b"401"),
        (["x-api-key: key-one", "x-api-key: key-one"], b"401"),
        (["x-api-key: Bearer key-one"], b"401"),
        (["x-api-key: "], b"401"),
    ],
)
def test_a_key_is_taken_by_either_header_but_not_two_that_differ(
    locked: Running, headers: list[str], status: bytes
) -> None:
    body = {"messages": HI, "max_tokens": 1}
    assert locked.raw(request_bytes(MESSAGES, body, *headers)).split(b" ", 2)[1] == status


# ---------------------------------------------------------------------- chunks


def shown(
    deltas: list[dict[str, Any]], reason: str, tokens: int = 5, media: Any = None, **more: Any
) -> list[dict[str, Any]]:
    """The events made of these deltas of chat; `media` comes with the reason."""

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for delta in [{"role": "assistant", "content": ""}, *deltas]:
            yield {"choices": [{"delta": delta, "finish_reason": None}]}
        yield {"choices": [{"delta": {}, "finish_reason": reason, "stop_reason": None}], "media": media}
        yield {"choices": [], "usage": {"completion_tokens": tokens}}

    body = checked({"messages": HI, "max_tokens": 5, **more}, MessagesRequest)
    ask = asked(body, Notes(), switch=False, reasons=True)
    head = ChunkHead("msg-1", 0, "tiny", lambda output, tokens: None)

    async def collected() -> list[dict[str, Any]]:
        return [event async for event in events(chunks(), ask, head, Prompted(7, 2), Notes())]

    return asyncio.run(collected())


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    async def given() -> AsyncGenerator[dict[str, Any], None]:
        for event in events:
            yield event

    return asyncio.run(fold(given()))


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    head = {} if name is None else {"id": f"call_{index}"}
    return {"tool_calls": [{"index": index, **head, "function": {"name": name, "arguments": arguments}}]}


def test_receipts_say_that_an_answer_repeats_itself() -> None:
    """Anthropic's API has no reason of that kind."""
    made = shown([{"content": "ha ha ha"}], "repetition", media=[{"lost": ["it repeats itself"]}])
    assert (made[-2]["type"], made[-2]["media"]) == ("message_delta", [{"lost": ["it repeats itself"]}])
    message = folded(made)
    assert (message["stop_reason"], message["media"]) == ("end_turn", [{"lost": ["it repeats itself"]}])


def test_blocks_follow_each_other() -> None:
    thoughts = [{"reasoning_content": "Long "}, {"reasoning_content": "ago."}]
    said = [{"content": "I "}, {"content": "look."}]
    calls = [call(0, '{"a":', "f"), call(0, " 1}"), call(1, "", "g")]
    made = shown([*thoughts, *said, *calls, {"content": "Done."}], "tool_calls")
    assert folded(made)["content"] == [
        {"type": "thinking", "thinking": "Long ago.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "g", "input": {}},
        {"type": "text", "text": "Done."},
    ]
    places = [
        (event["type"], event["index"])
        for event in made
        if event["type"] in ("content_block_start", "content_block_stop")
    ]
    assert places == [(f"content_block_{edge}", k) for k in range(5) for edge in ("start", "stop")]


def test_an_answer_that_is_cut_off_says_where() -> None:
    cut = folded(shown([call(0, '{"a": "Os', "f")], "length"))
    assert cut["content"] == [
        {"type": "tool_use", "id": "call_0", "name": "f", "input": {}, "partial_json": '{"a": "Os'}
    ]
    assert cut["stop_reason"] == "max_tokens"
    assert folded(shown([], "length", 3))["stop_reason"] == "model_context_window_exceeded"
    usage = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 5}
    assert cut["usage"] == usage


# ---------------------------------------------------------------------- conversations


def conversation(*messages: dict[str, Any], **more: Any) -> Asked:
    body = checked({"messages": list(messages), "max_tokens": 5, **more}, MessagesRequest)
    return asked(body, Notes(), switch=False, reasons=False)


def test_results_stand_between_words_and_places_lead_back() -> None:
    text = {"type": "text", "text": "See."}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "\xe9"}}
    made = conversation(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, text, use]},
        {"role": "user", "content": [RESULT, {**RESULT, "content": "y"}, text, BAD_IMAGE]},
        system=[text, text],
    )
    messages = [message.model_dump(exclude_none=True) for message in made.body.messages]
    assert [message["role"] for message in messages] == ["system", "assistant", "tool", "tool", "user"]
    assert messages[1]["reasoning_content"] == "Hm."
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"a": "\xe9"}
    assert [part["type"] for part in messages[4]["content"]] == ["text", "image_url"]
    for param, place in {
        "messages.0.content.1": "system.1",
        "messages.1.tool_calls.0.function.arguments": "messages.0",
        "messages.2.content.1.image_url": "messages.1.content.0.content.1",
        "messages.3.content": "messages.1.content.1",
        "messages.4.content.1.image_url": "messages.1.content.3",
        "messages.9.role": "messages",
        "max_tokens": "max_tokens",
    }.items():
        assert made.names.placed(param) == place
    assert isinstance(made.body, ChatRequest)
    assert made.body.continue_final_message is None


def test_what_is_too_large_as_a_chat_is_refused(running: Running) -> None:
    """A title is a part of its own; such requests failed with 500."""
    document = {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": [document] * 4000}]}
    answer = running.post("/v1/messages", asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
