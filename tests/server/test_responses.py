"""/v1/responses: OpenAI's own client gets what it expects, and what is kept can be gone on with, within its bound."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import openai
import pytest

from beheld.server import errors
from beheld.server.chat import ChunkHead
from beheld.server.custom_tools import input_of
from beheld.server.errors import HttpError
from beheld.server.notes import Notes
from beheld.server.read import checked
from beheld.server.response_events import ResponseEvents
from beheld.server.response_requests import ResponseAsked, asked
from beheld.server.response_store import ResponseStore, Stored, size_of
from beheld.server.responses_schema import ResponsesRequest
from tests.server.running import ENGINE, Running, data_url, talk
from tests.server.test_forms import OPENED

RESPONSES = "/v1/responses"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as found:
        yield found
    running.idle()


def said(running: Running, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """Chat's answer to the same."""
    asked = {"messages": messages, "temperature": 0, "max_tokens": 12, **body}
    found: dict[str, Any] = running.post("/v1/chat/completions", asked).json()
    return found


def pictured(text: str, *urls: str) -> Any:
    parts = [{"type": "input_image", "image_url": url, "detail": "low"} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]


def test_pictures_are_answered_as_chat_answers_them(client: openai.OpenAI, running: Running) -> None:
    urls = [data_url(seed=1), data_url(56, 84, seed=2)]
    found = client.responses.create(input=pictured("Compare.", *urls), instructions="Be short.", **GREEDY)
    chat = said(running, [{"role": "system", "content": "Be short."}, *talk("Compare.", *urls)])
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    extra = found.model_extra or {}
    assert [item["given"]["width"] for item in extra["media"]] == [84, 56]
    assert [warning["param"] for warning in extra["warnings"]] == ["detail"]


def test_a_stream_has_openais_events_and_says_what_the_whole_says(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Weather?", **GREEDY)
    with client.responses.stream(input="Weather?", **GREEDY) as stream:
        events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    assert final.output_text == whole.output_text != ""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]


def test_log_probabilities_are_those_of_chat(client: openai.OpenAI, running: Running) -> None:
    asked: Any = {"input": "Weather?", "include": ["message.output_text.logprobs"], "top_logprobs": 3, **GREEDY}
    chat = said(running, talk("Weather?"), logprobs=True, top_logprobs=3)
    whole = client.responses.create(**asked).to_dict()["output"][0]["content"][0]["logprobs"]
    own = chat["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in whole] == [entry["bytes"] for entry in own]
    # A cached prefix may change the last digits.
    assert [entry["logprob"] for entry in whole] == pytest.approx([entry["logprob"] for entry in own], abs=1e-4)
    assert [len(entry["top_logprobs"]) for entry in whole] == [3] * GREEDY["max_output_tokens"]
    with client.responses.stream(**asked) as stream:
        events = [event.to_dict() for event in stream]
    parts = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    assert [entry for part in parts for entry in part] == done
    assert [entry["bytes"] for entry in done] == [entry["bytes"] for entry in whole]
    (added,) = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert added["logprobs"] == []
    told = client.responses.create(input="Weather?", top_logprobs=3, **GREEDY)
    assert [warning["param"] for warning in (told.model_extra or {})["warnings"]] == ["top_logprobs"]
    assert told.to_dict()["output"][0]["content"][0]["logprobs"] == []


def test_a_conversation_goes_on(client: openai.OpenAI, running: Running) -> None:
    first = client.responses.create(input=pictured("What?", data_url(seed=3)), instructions="Gone later.", **GREEDY)
    second = client.responses.create(input="And then?", previous_response_id=first.id, **GREEDY)
    messages = [
        *talk("What?", data_url(seed=3)),
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    chat = said(running, messages)
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage is not None
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]
    third = client.responses.create(input="And?", previous_response_id=second.id, **GREEDY)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens
    written: Any = [*pictured("What?", data_url(seed=3)), *first.output, {"role": "user", "content": "And then?"}]
    assert client.responses.create(input=written, **GREEDY).output_text == second.output_text
    same = client.responses.retrieve(second.id)
    assert (same.id, same.output_text, same.previous_response_id) == (second.id, second.output_text, first.id)
    client.responses.delete(second.id)
    for gone in (lambda: client.responses.retrieve(second.id), lambda: client.responses.delete(second.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(input="x", previous_response_id=second.id, **GREEDY)
    assert missing.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="complete"):
        client.responses.cancel(first.id)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    found = client.responses.create(input="x", store=False, **GREEDY)
    assert (found.model_extra or {})["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_a_running_response_is_cancelled_by_its_name(running: Running) -> None:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client:
        # A list that cannot end before the length does.
        numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": numbers}}
        options: Any = {**GREEDY, "max_output_tokens": 1900}
        stream = client.responses.create(input="Go on.", stream=True, text=form, **options)
        created = next(iter(stream))
        assert created.type == "response.created"
        assert client.responses.retrieve(created.response.id).status == "in_progress"
        cancelled = client.responses.cancel(created.response.id)
        last = list(stream)[-1]
        assert last.response.status == cancelled.status == "cancelled"  # type: ignore[union-attr]
        assert client.responses.cancel(created.response.id).status == "cancelled"
    running.idle()


def ended(client: openai.OpenAI, name: str) -> Any:
    """The response, once it does not change any more."""
    for _ in range(600):
        found = client.responses.retrieve(name)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def test_a_response_is_answered_in_the_background(client: openai.OpenAI, running: Running) -> None:
    asked = client.responses.create(input="Go on.", background=True, **GREEDY)
    assert (asked.status, asked.background, asked.output) == ("queued", True, [])
    found, waited = ended(client, asked.id), client.responses.create(input="Go on.", **GREEDY)
    assert (found.status, found.output_text, found.usage.output_tokens) == ("incomplete", waited.output_text, 12)
    further = client.responses.create(input="And?", previous_response_id=found.id, **GREEDY)
    assert further.usage is not None
    assert further.usage.input_tokens > found.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a completed"):
        client.responses.cancel(found.id)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous"):
        client.responses.cancel(further.id)
    broken = ended(client, client.responses.create(input=pictured("x", "data:,no"), background=True, **GREEDY).id)
    assert broken.status == "failed"
    assert broken.error.code != "error"
    assert "image" in broken.error.message
    with pytest.raises(openai.BadRequestError, match="was never answered"):
        client.responses.create(input="And?", previous_response_id=broken.id, **GREEDY)
    for more in ({"store": False}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(input="x", background=True, **more, **GREEDY)  # type: ignore[call-overload]
        assert refused.value.param in more
    running.idle()


def test_an_answer_in_the_background_is_cancelled(client: openai.OpenAI, running: Running) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": numbers}}
    options: Any = {**GREEDY, "max_output_tokens": 1900, "text": form, "background": True}
    asked = client.responses.create(input="Go on.", **options)
    with pytest.raises(openai.BadRequestError) as early:
        client.responses.create(input="And?", previous_response_id=asked.id, **GREEDY)
    assert early.value.code == "response_not_complete"
    assert client.responses.cancel(asked.id).status == "cancelled"
    assert client.responses.cancel(asked.id).status == "cancelled"
    # One that is deleted ends too.
    client.responses.delete(client.responses.create(input="Go on.", **options).id)
    running.idle()


def test_a_function_is_called_and_its_result_taken(client: openai.OpenAI) -> None:
    options: Any = {**GREEDY, "max_output_tokens": 200, "tools": TOOLS, "parallel_tool_calls": False}
    for choice in ({"type": "function", "name": "weather"}, "required"):
        whole = client.responses.create(input="Weather?", tool_choice=choice, **options)
        (call,) = whole.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)["place"] in ("Oslo", "Rome")) == ("weather", True)
        with client.responses.stream(input="Weather?", tool_choice=choice, **options) as stream:
            (streamed,) = stream.get_final_response().output
        assert streamed.arguments == call.arguments  # type: ignore[union-attr]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
        later = client.responses.create(input=result, previous_response_id=whole.id, **GREEDY)
        written: Any = [{"role": "user", "content": "Weather?"}, *whole.output, *result]
        assert later.output_text == client.responses.create(input=written, **GREEDY).output_text


def test_functions_of_a_namespace_have_both_names(client: openai.OpenAI) -> None:
    (function,) = TOOLS
    space: Any = {"type": "namespace", "name": "mcp", "description": "Of a server.", "tools": [function]}
    options: Any = {**GREEDY, "max_output_tokens": 200, "tools": [space], "tool_choice": "required"}
    first = client.responses.create(input="Weather?", **options)
    flat: Any = [{**function, "name": "mcp__weather", "description": "Of a server."}]
    same = client.responses.create(input="Weather?", **{**options, "tools": flat})
    called, other = first.output[0], same.output[0]
    assert called.type == other.type == "function_call"
    assert (called.name, called.namespace) == ("weather", "mcp")
    assert (other.name, called.arguments) == ("mcp__weather", other.arguments)
    with client.responses.stream(input="Weather?", **options) as stream:
        added = [event.item for event in stream if event.type == "response.output_item.added"]
    assert next((item.name, item.namespace) for item in added if item.type == "function_call") == ("weather", "mcp")
    # The client may write either name; the model sees the same one again.
    more: Any = {"input": "And?", **options}
    written: Any = [{"role": "user", "content": "Weather?"}, *first.output, {"role": "user", "content": "And?"}]
    kept = client.responses.create(previous_response_id=same.id, **more)
    for again in ({"previous_response_id": first.id}, {"input": written}):
        found = client.responses.create(**{**more, **again})
        assert found.usage is not None
        assert kept.usage is not None
        assert found.usage.input_tokens == kept.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="64 letters"):
        client.responses.create(input="x", tools=[{**space, "name": "m" * 60}], **GREEDY)


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    found = client.responses.create(input="Where?", text=form, **{**GREEDY, "max_output_tokens": 60})
    assert json.loads(found.output_text)["place"] in ("Oslo", "Rome")
    assert found.status == "completed"


def test_reasoning_is_an_item() -> None:
    running = Running("qwen2", ENGINE | OPENED, reasoning_parser="think", api_keys=("key-one", "key-two"))
    try:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="key-one", max_retries=0) as client:
            effort: Any = {"effort": "low", "summary": "auto"}
            found = client.responses.create(input="Weather?", reasoning=effort, **GREEDY)
            (thought,) = found.output
            assert thought.type == "reasoning"
            assert thought.content
            assert thought.content[0].text
            assert found.usage is not None
            assert 0 < found.usage.output_tokens_details.reasoning_tokens <= 12
            with client.responses.stream(input="Weather?", **GREEDY) as stream:
                kinds = {event.type for event in stream}
            assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
            again = client.responses.create(input="And?", previous_response_id=found.id, **GREEDY)
            assert again.output
        with openai.OpenAI(base_url=running.url + "/v1", api_key="key-two", max_retries=0) as other:
            for ask in (
                lambda: other.responses.retrieve(found.id),
                lambda: other.responses.delete(found.id),
                lambda: other.responses.cancel(found.id),
                lambda: other.responses.create(input="x", previous_response_id=found.id, **GREEDY),
            ):
                with pytest.raises(openai.NotFoundError):
                    ask()
        running.idle()
    finally:
        running.close()


def test_raw_messages_are_what_the_model_read_and_wrote() -> None:
    """Also where reasoning is split off; whole, streamed, kept, and long enough to be written in pieces."""
    running = Running("qwen2", ENGINE | OPENED, reasoning_parser="think")
    try:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0) as client:
            asked: Any = {"input": "Weather? " * 20, "extra_body": {"enable_response_messages": True}, **GREEDY}
            found: Any = client.responses.create(**{**asked, "max_output_tokens": 60}).to_dict()
            (read,), (written,) = found["input_messages"], found["output_messages"]
            assert read["type"] == written["type"] == "raw_message_tokens"
            talked: dict[str, Any] = {"messages": talk(asked["input"])}
            assert read["tokens"] == running.post("/tokenize", talked).json()["tokens"]
            assert read["message"] == running.post("/detokenize", {"tokens": read["tokens"]}).json()["prompt"]
            chat = said(running, talk(asked["input"]), max_tokens=60, return_token_ids=True)["choices"][0]
            assert written["tokens"] == chat["token_ids"]
            assert len(written["tokens"]) == found["usage"]["output_tokens"] == 60
            # The tiny model ends its reasoning nowhere: all that it wrote is that, but for blanks around it.
            assert written["message"].strip() == found["output"][0]["content"][0]["text"]
            assert client.responses.retrieve(found["id"]).to_dict()["output_messages"] == [written]
            with client.responses.stream(**asked) as stream:
                events: list[Any] = [event.to_dict() for event in stream]
            last = events[-1]["response"]
            assert last["input_messages"] == [read]
            assert last["output_messages"][0]["tokens"] == written["tokens"][:12]
            assert written["message"].startswith(last["output_messages"][0]["message"])
            assert not any("input_messages" in event.get("response", {}) for event in events[:-1])
            plain = client.responses.create(input="x", **GREEDY).to_dict()
            assert "input_messages" not in plain
        running.idle()
    finally:
        running.close()


FILE = {"type": "input_image", "file_id": "x"}
BAD = {"type": "input_image", "image_url": "data:image/png;base64,eHh4"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must"),
        ({"max_tokens": 5}, "max_tokens", "Use max_output_tokens."),
        ({"background": True, "stream": True}, "stream", "Leave stream or background out."),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"truncation": "auto"}, "truncation", "shorter"),
        ({"top_logprobs": 10**6, "include": ["message.output_text.logprobs"]}, "top_logprobs", "top_logprobs asks for"),
        ({"include": ["web_search_call.results"]}, "include", "cannot be included"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "none of the type 'mcp'"),
        ({"tools": [{"type": "file_search"}]}, "tools", "runs no tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", ""),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "no schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format", ""),
        ({"input": []}, "input", "at least one"),
        # Found by schemathesis: reasoning without a text is nothing to answer.
        ({"input": [{"type": "reasoning"}]}, "input", "no message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "'function_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input.0.content.0", "'input_image'"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input.0.content.0.file_id", "image_url"),
        ({"input": [{"role": "assistant", "content": [BAD]}]}, "input.0.content.0", "text only"),
        ({"input": [{"role": "user", "content": [BAD]}], "instructions": "x"}, "input.0.content.0", "image 1"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [BAD]}]}, "input.0.output.0", "image 1"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(running: Running, body: dict[str, Any], param: str, words: str) -> None:
    answer = running.post(RESPONSES, {"input": "x", "max_output_tokens": 2, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


# ---------------------------------------------------------------------- chunks


def shown(deltas: list[dict[str, Any]], store: ResponseStore, fails: bool = False) -> list[dict[str, Any]]:
    """The events made of these deltas of chat."""

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for delta in [{"role": "assistant", "content": ""}, *deltas]:
            own = {name: value for name, value in delta.items() if name != "logprobs"}
            yield {"choices": [{"delta": own, "finish_reason": None, "logprobs": delta.get("logprobs")}]}
        if fails:
            raise HttpError(500, "It broke.", "Try again.")
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        counts: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        counts |= {"completion_tokens_details": {"reasoning_tokens": 2}}
        yield {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 0}}}

    head = ChunkHead("resp-1", 0, "tiny", lambda output, tokens: None)
    found: list[dict[str, Any]] = []

    async def collect() -> None:
        made = ResponseEvents(request("x"), head, Notes(), store, "")
        async for event in made.events(chunks()):
            found.append(json.loads(json.dumps(event)))

    if fails:
        with pytest.raises(HttpError):
            asyncio.run(collect())
    else:
        asyncio.run(collect())
    return found


def request(given: Any, earlier: Any = (), **more: Any) -> ResponseAsked:
    return asked(checked({"input": given, **more}, ResponsesRequest), earlier, Notes())


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    head = {} if name is None else {"id": f"call_{index}"}
    return {"tool_calls": [{"index": index, **head, "function": {"name": name, "arguments": arguments}}]}


def test_items_follow_each_other_and_go_on_as_one_message() -> None:
    store = ResponseStore(1 << 20)
    deltas = [{"reasoning_content": "Long "}, {"reasoning_content": "ago."}, {"content": "I "}, {"content": "look."}]
    events = shown([*deltas, call(0, '{"a":', "f"), call(0, " 1}"), call(1, "{}", "g")], store)
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    # What the deltas add up to is what the events that end them say.
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        elif event["type"].endswith(("text.done", "arguments.done")):
            assert texts[event["output_index"]] == event.get("text", event.get("arguments"))
    assert texts == {0: "Long ago.", 1: "I look.", 2: '{"a": 1}', 3: "{}"}
    assert all(event["item"]["content"] == [] for event in events[2:4] if event["type"].endswith("item.added"))
    user, answer = store.get("resp-1", "").history
    assert user == {"role": "user", "content": "x"}
    assert (answer["reasoning_content"], answer["content"]) == ("Long ago.", "I look.")
    assert [made["function"]["name"] for made in answer["tool_calls"]] == ["f", "g"]
    written = request([{"role": "user", "content": "x"}, *response["output"], {"role": "user", "content": "y"}])
    assert written.history == [user, answer, {"role": "user", "content": "y"}]


def entries(*texts: str) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": text, "logprob": -1.0, "bytes": list(text.encode())} for text in texts]}}


@pytest.mark.parametrize(
    "deltas",
    [
        [
            {"reasoning_content": "hm é", **entries("<think>", "hm", " é", "\n", "</think>", "\n", "é", ".")},
            {"content": "é."},
        ],
        [
            entries("<think>"),
            {"reasoning_content": "hm", **entries("hm")},
            {"reasoning_content": " é", **entries(" é", "\n")},
            entries("</think>", "\n"),
            {"content": "é", **entries("é")},
            {"content": ".", **entries(".")},
        ],
        [
            {"reasoning_content": "x", **entries("x", "</think>", "é")},
            {"content": "é"},
            {"content": ".", **entries(".")},
        ],
    ],
)
def test_log_probabilities_of_reasoning_are_left_out(deltas: list[dict[str, Any]]) -> None:
    """A whole answer comes with all of them at its first delta."""
    _, message = shown(deltas, ResponseStore(1 << 20))[-1]["response"]["output"]
    (part,) = message["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["é", "."]


def test_half_an_answer_is_not_kept() -> None:
    store = ResponseStore(1 << 20)
    assert shown([{"content": "x"}], store, fails=True)[-1]["type"] == "response.output_text.delta"
    assert store.num_bytes == 0
    with pytest.raises(HttpError):
        store.get("resp-1", "")


def test_places_lead_back() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": parts},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    made = request(items, ({"role": "user", "content": "x"},), instructions="Be short.")
    assert [message.role for message in made.body.messages] == ["system", "user", "system", "assistant", "tool"]
    for param, place in {
        "messages.0.content": "instructions",
        "messages.1.content.0.image_url": "previous_response_id",
        "messages.2.content.1": "input.0.content.1",
        "messages.3.tool_calls.0.function.arguments": "input.1",
        "messages.4.content.0": "input.2.output.0",
    }.items():
        assert made.names.placed(param) == place


# ---------------------------------------------------------------------- the store


def stored(name: str, size: int, owner: str = "") -> Stored:
    history = ({"content": "x" * size},)
    return Stored(owner, {"id": name}, history, size_of(history))


def test_the_store_keeps_to_its_bound_and_the_least_used_goes_first() -> None:
    store = ResponseStore(10_000)
    for name in "abc":
        assert store.put(stored(name, 2000))
    assert store.get("a", "").response == {"id": "a"}
    assert store.put(stored("d", 3500))
    assert [name for name in "abcd" if store.holds(name)] == ["a", "c", "d"]
    assert not store.put(stored("e", 20_000))
    assert store.num_bytes <= 10_000
    assert store.put(stored("a", 100)), "counted anew, not twice"
    for name in "acd":
        store.delete(name, "")
    assert store.num_bytes == 0
    assert not ResponseStore(0).put(stored("a", 1))
    assert size_of({"a": ["\U0001f600" * 10]}) > 40


def test_a_server_that_stores_little_says_so_and_takes_no_more(tmp_path: Any) -> None:
    running = Running(max_stored_bytes=20_000)
    try:
        names = []
        for number in range(8):
            body = {"input": f"{number} " + "x" * 1500, "max_output_tokens": 2}
            answer = running.post(RESPONSES, body).json()
            assert answer["store"] is True
            names.append(answer["id"])
        kept = [name for name in names if running.get(f"{RESPONSES}/{name}").status_code == 200]
        assert kept == names[-len(kept) :]
        assert 0 < len(kept) < 8
        url = data_url(400, 400, seed=9)
        assert len(url) > 20_000
        large = running.post(RESPONSES, {"input": pictured("x", url), "max_output_tokens": 1}).json()
        assert large["store"] is False
        assert running.get(f"{RESPONSES}/{large['id']}").status_code == 404
        running.idle()
    finally:
        running.close()


@pytest.mark.parametrize("path", [RESPONSES, "/v1/chat/completions", "/v1/completions"])
def test_allowed_ids_are_no_more_than_there_are_tokens(running: Running, path: str) -> None:
    body = {RESPONSES: {"input": "x"}, "/v1/completions": {"prompt": "x"}}.get(path, {"messages": talk("x")})
    error = running.post(path, body | {"allowed_token_ids": [5] * 5000}).json()["error"]
    assert "List each token once." in error["remedy"], error
    running.idle()


@pytest.mark.parametrize("text", ["", "a", 'He said "no" \\ and\nleft', "caf\u00e9 \U0001f600 end"])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_call_of_a_custom_tool_that_was_cut_has_the_text_so_far(text: str, ascii_only: bool) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=ascii_only)
    begin = len('{"input": "')
    found = [input_of(whole[:stop]) for stop in range(begin, len(whole) + 1)]
    assert all(text.startswith(one) for one in found)
    assert [len(one) for one in found] == sorted(len(one) for one in found)
    assert found[-3:] == [text] * 3
    assert [input_of(whole[:stop]) for stop in (0, 5, begin - 1)] == [""] * 3
    assert input_of("no JSON") == "no JSON"


def test_a_choice_among_searches_alone(running: Running) -> None:
    body = {"input": "x", "tools": [{"type": "web_search"}], "max_output_tokens": 1}
    error = running.post(RESPONSES, body | {"tool_choice": "required"}).json()["error"]
    assert "web_search" in error["message"]
    assert error["param"] == "tool_choice"
    assert running.post(RESPONSES, body | {"tool_choice": "auto"}).status_code == 200
    running.idle()


def test_a_refused_response_in_the_background_leaves_nothing() -> None:
    """A conversation that the store has no room for is refused at once, and not forgotten later."""
    small = Running(max_stored_bytes=20_000)
    try:
        more = {"include": ["message.output_text.logprobs"], "top_logprobs": -1, "background": True}
        for _ in range(2):
            found = small.post(RESPONSES, {"input": "x" * 30_000, "max_output_tokens": 1000, **more})
            assert (found.status_code, found.json()["error"]["param"]) == (400, "background")
        assert small.admission.held_bytes == 0
        assert small.admission.busy == 0
    finally:
        small.close()


def test_an_unanswered_response_keeps_no_conversation() -> None:
    store, given = ResponseStore(1 << 20), request("x" * 10_000, background=True)
    head = ChunkHead("resp-1", 0, "tiny", lambda output, tokens: None)
    made = ResponseEvents(given, head, Notes(), store, "")
    stored = made.queue()
    assert store.num_bytes > 10_000

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        raise HttpError(400, "It is broken.", "Send another.")
        yield {}

    async def collect() -> None:
        async for _ in made.events(chunks()):
            raise AssertionError

    with pytest.raises(HttpError, match="It is broken"):
        asyncio.run(collect())
    assert (stored.response["status"], stored.history) == ("failed", ())
    assert 0 < store.num_bytes == size_of(stored.response) < 10_000
    with pytest.raises(HttpError, match="was never answered"):
        store.history_of("resp-1", "")


def test_namespaces_copy_no_description_for_too_many_functions() -> None:
    functions = [{"type": "function", "name": f"f{index}", "parameters": {}} for index in range(100)]
    spaces = [{"type": "namespace", "name": f"n{k}", "description": "d" * 65_000, "tools": functions} for k in range(2)]
    tracemalloc.start()
    try:
        given = checked({"input": "x", "tools": spaces}, ResponsesRequest)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(HttpError, match="There are 200 tools; at most 128"):
            asked(given, (), Notes())
        assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("background", "times"), [(False, 0), (True, 1)])
def test_who_answers_the_client_logs_an_internal_error(
    background: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a client that waits, the response does; otherwise the error was logged twice."""
    head = ChunkHead("resp-1", 0, "tiny", lambda output, tokens: None)
    made = ResponseEvents(request("x", background=background), head, Notes(), ResponseStore(1 << 20), "")

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        raise ZeroDivisionError
        yield {}

    async def collect() -> None:
        async for _ in made.events(chunks()):
            raise AssertionError

    lines: list[str] = []
    monkeypatch.setattr(errors.logger, "error", lambda words, *more, **options: lines.append(words % more))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect())
    assert len(lines) == times
