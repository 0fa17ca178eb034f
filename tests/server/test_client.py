"""The official client gets what it expects, whole and streamed, alone and in company."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from beheld.server.schema import ChatRequest
from beheld.server.template_options import variables_of
from tests.server.running import ENGINE, PAGES, Running, data_url, talk


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    """The synchronous client."""
    with openai.OpenAI(base_url=running.url + "/v1", api_key="EMPTY", max_retries=0) as found:
        yield found


def streamed(chunks: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """(text by index, finish reason by index, usage) of a stream."""
    text: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    return text, reasons, usage


GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_completion_tokens": 20,
    "extra_body": {"ignore_eos": True},
}


class City(pydantic.BaseModel):
    """A small object within another."""

    name: Literal["Oslo", "Rome"]
    rainy: bool


class Trip(pydantic.BaseModel):
    """An object whose schema has definitions."""

    first: City
    last: City


def test_parse_gives_the_object(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Where to?"}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0}
    made = (
        client.chat.completions.parse(messages=asked, response_format=Trip, max_completion_tokens=300, **options)
        .choices[0]
        .message
    )
    assert isinstance(made.parsed, Trip)
    assert made.content is not None
    assert made.parsed == Trip.model_validate_json(made.content)
    response = client.responses.parse(input="Where to?", text_format=Trip, max_output_tokens=300, **options)
    assert isinstance(response.output_parsed, Trip)
    tool: Any = openai.pydantic_function_tool(Trip)
    (call,) = (
        client.chat.completions.parse(
            messages=asked, tools=[tool], tool_choice="required", max_completion_tokens=300, **options
        )
        .choices[0]
        .message.tool_calls
        or ()
    )
    assert isinstance(call.function.parsed_arguments, Trip)


def test_the_last_text_of_a_stream_says_why_it_ended(client: openai.OpenAI) -> None:
    """As vLLM's streams do, of which clients count a chunk for each token; text and its end are one event less."""
    chunks = list(client.chat.completions.create(messages=talk("Compare."), stream=True, **GREEDY))
    last = chunks[-1].choices[0]
    assert (last.finish_reason, bool(last.delta.content)) == ("length", True)
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert (last.model_extra or {})["stop_reason"] is None


def test_chat_with_pictures_streams_what_it_says_whole(client: openai.OpenAI) -> None:
    messages: Any = talk("Compare.", data_url(seed=1), data_url(56, 84, seed=2))
    whole = client.chat.completions.create(messages=messages, **GREEDY)
    text, reasons, usage = streamed(
        client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert text == {0: whole.choices[0].message.content}
    assert reasons == {0: "length"}
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 20
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    media = whole.model_extra["media"]  # type: ignore[index]
    assert [item["given"]["width"] for item in media] == [84, 56]
    assert sum(item["tokens"] for item in media) < whole.usage.prompt_tokens


def test_text_stays_in_place_between_pictures(client: openai.OpenAI) -> None:
    url = {"type": "image_url", "image_url": {"url": data_url(), "detail": "auto"}}
    orders: list[list[Any]] = [
        [url, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "text", "text": "a"}, url, {"type": "text", "text": "b"}],
    ]
    found = [
        client.chat.completions.create(messages=[{"role": "user", "content": parts}], logprobs=True, **GREEDY)
        for parts in orders
    ]
    first, second = ([entry.logprob for entry in f.choices[0].logprobs.content or []] for f in found)  # type: ignore[union-attr]
    assert first != second


def test_n_answers_with_a_seed_come_again(client: openai.OpenAI) -> None:
    options: Any = {
        "messages": talk("Say."),
        "model": "tiny",
        "n": 3,
        "seed": 7,
        "max_completion_tokens": 12,
        "temperature": 2.0,
        "top_p": 1.0,
        "extra_body": {"top_k": 0},
    }
    whole = client.chat.completions.create(**options)
    again = client.chat.completions.create(**options)
    text, _, _ = streamed(client.chat.completions.create(stream=True, **options))
    said = [choice.message.content for choice in whole.choices]
    assert said == [choice.message.content for choice in again.choices]
    assert [text[k] for k in range(3)] == said
    assert len(set(said)) > 1


def test_logprobs_have_their_top(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=talk(), logprobs=True, top_logprobs=3, **GREEDY)  # type: ignore[arg-type]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 20
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed_entries = [
        entry
        for chunk in client.chat.completions.create(messages=talk(), logprobs=True, stream=True, **GREEDY)  # type: ignore[arg-type]
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert [e.logprob for e in streamed_entries] == pytest.approx([e.logprob for e in logprobs.content], abs=1e-4)
    assert all(entry.top_logprobs == [] for entry in streamed_entries)


def test_stop_strings_end_and_do_not_show(client: openai.OpenAI, running: Running) -> None:
    text = client.completions.create(prompt="once", **_completion(GREEDY)).choices[0].text
    stop = text[len(text) // 2 :][:2]
    options = _completion(GREEDY) | {"max_tokens": 400}
    found = client.completions.create(prompt="once", stop=[stop], **options).choices[0]
    assert found.text == text[: text.index(stop)]
    assert found.finish_reason == "stop"
    running.idle()


@pytest.mark.parametrize(
    ("bias", "words"),
    [({"bad": 1}, "'bad', which is not"), ({"bad": 1, "5": 2, "-1": 1}, "'bad', '-1', which are not")],
)
def test_each_wrong_token_of_a_bias_is_named(client: openai.OpenAI, bias: dict[str, int], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(model="tiny", prompt="once", logit_bias=bias, max_tokens=1)


def test_logit_bias_and_penalties_reach_the_sampler(client: openai.OpenAI, running: Running) -> None:
    ids = running.post("/tokenize", {"prompt": "x"}).json()["tokens"]
    options = _completion(GREEDY) | {"max_tokens": 5}
    found = client.completions.create(prompt="once", logit_bias={str(ids[0]): 100}, **options).choices[0].text
    assert found == running.post("/detokenize", {"tokens": ids * 5}).json()["prompt"]
    free = client.completions.create(prompt="once", logit_bias={str(ids[0]): 100}, frequency_penalty=2, **options)
    assert free.choices[0].text == found, "a bias of 100 outweighs the penalty"
    varied = client.completions.create(prompt="once", presence_penalty=2, **_completion(GREEDY)).choices[0].text
    assert varied != client.completions.create(prompt="once", **_completion(GREEDY)).choices[0].text


def test_completions_of_several_prompts_keep_their_places(client: openai.OpenAI) -> None:
    prompts = ["one", "two and two", "three"]
    options = _completion(GREEDY)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, **options)
    assert [choice.text for choice in together.choices] == alone
    text = ["", "", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            text[choice.index] += choice.text
    assert text == alone
    echoed = client.completions.create(prompt="one", echo=True, logprobs=None, **options).choices[0].text
    assert echoed == "one" + alone[0]
    entry = client.completions.create(prompt="one", logprobs=2, **options).choices[0].logprobs
    assert entry is not None
    assert len(entry.tokens or []) == len(entry.top_logprobs or []) == 20


def test_many_at_once_get_each_their_own(running: Running) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="EMPTY", max_retries=0) as client:

            async def one(number: int) -> str:
                messages: Any = talk(f"Number {number % 4}?", data_url(seed=number % 4))
                options = {**GREEDY, "messages": messages}
                if number % 2:
                    return (await client.chat.completions.create(**options)).choices[0].message.content or ""
                text = ""
                async for chunk in await client.chat.completions.create(stream=True, **options):
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                return text

            alone = [await one(number) for number in range(4)]
            found = await asyncio.gather(*(one(number) for number in range(32)))
            assert found == [alone[number % 4] for number in range(32)]
            assert len(set(alone)) > 1

    asyncio.run(ask())
    running.idle()


def test_models_and_errors_have_openais_form(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    card = client.models.retrieve("tiny").model_extra
    assert card is not None
    assert (card["max_model_len"], card["root"], card["permission"]) == (2048, "tiny", [])
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=talk())  # type: ignore[arg-type]
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=talk(), temperature=-1)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="tiny", messages=talk(), extra_body={"temprature": 1})  # type: ignore[arg-type]
    assert "temperature" in str(unknown.value)
    with pytest.raises(openai.BadRequestError):
        for _ in client.chat.completions.create(model="tiny", messages=talk("x" * 9000), stream=True):  # type: ignore[arg-type]
            pass


def test_tokenize_is_what_generate_sees(running: Running) -> None:
    messages = talk("Hello <|im_end|> you", data_url())
    ids = running.post("/tokenize", {"messages": messages}).json()
    used = running.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]
    assert ids["count"] == len(ids["tokens"]) == used["prompt_tokens"]
    text = running.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"]
    assert "Hello" in text
    assert ids["token_strs"] is None
    strings = running.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()["token_strs"]
    assert len(strings) == ids["count"]
    assert "".join(strings[:1]) in text


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def showing() -> Iterator[Running]:
    """A server whose template shows tools and a variable."""
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    template = text + "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood }}{{ reasoning_effort }}"
    found = Running("llama", ENGINE | {"chat_template": template, "limit_mm_per_prompt": None})
    yield found
    found.close()


def test_tokenize_counts_what_a_chat_with_tools_takes(showing: Running) -> None:
    counts = []
    for own in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"mood": "glad"}}, {"reasoning_effort": "medium"}):
        body = {"messages": [{"role": "user", "content": "Hello"}], **own}
        counts.append(showing.post("/tokenize", body).json()["count"])
        asked = {**body, "max_tokens": 1, "tool_choice": "required" if "tools" in own else None}
        usage = showing.post("/v1/chat/completions", asked).json()["usage"]
        assert usage["prompt_tokens"] == counts[-1]
    assert counts[0] < min(counts[1:])
    for own, param in (
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ):
        answer = showing.post("/tokenize", {"messages": [{"role": "user", "content": "Hello"}], **own})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    counted = [
        showing.post("/v1/messages/count_tokens", body | own).json()["input_tokens"]
        for own in ({}, {"output_config": {"effort": "medium"}})
    ]
    assert counted == [counts[0], counts[3]]
    refused = {"tools": [TOOL], "chat_template_kwargs": {}, "continue_final_message": True, "reasoning_effort": "low"}
    for name, value in refused.items():
        answer = showing.post("/tokenize", {"prompt": "x", name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_tokenize_with_what_the_tokenizer_puts_around_a_prompt_and_without(showing: Running) -> None:
    tokenizer = showing.llm.get_tokenizer()
    for said, adds in (({}, True), ({"add_special_tokens": True}, True), ({"add_special_tokens": False}, False)):
        found = showing.post("/tokenize", {"prompt": "Hello you", **said}).json()
        assert found["tokens"] == tokenizer.encode("Hello you", add_special_tokens=adds)
    for said in ({}, {"add_special_tokens": False}):
        error = showing.post("/tokenize", {"prompt": "x" * 500_000, **said}).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_documents_and_versions(running: Running) -> None:
    document = running.get("/openapi.json").json()
    routes = {route.path.replace(":path", "") for route in running.app.routes} - PAGES  # type: ignore[attr-defined]
    assert set(document["paths"]) == routes
    # Of the route of its own, and of /invocations.
    assert json.dumps(document).count("#/components/schemas/ChatRequest") == 2
    assert running.get("/version").json()["version"]
    assert "beheld_requests_total" in running.get("/metrics").text


def _completion(options: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens" if k == "max_completion_tokens" else k: v for k, v in options.items()}


OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


def test_allowed_tools_are_all_that_the_model_sees_and_may_call(showing: Running) -> None:
    client = openai.OpenAI(base_url=showing.url + "/v1", api_key="EMPTY")
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]},
    }
    messages = [{"role": "user", "content": "x"}]
    options: Any = {"model": "tiny", "messages": messages, "max_tokens": 60, "temperature": 0}
    made = client.chat.completions.create(**options, tools=[TOOL, OTHER], tool_choice=allowed)
    alone = client.chat.completions.create(**options, tools=[OTHER], tool_choice="required")
    assert made.usage is not None
    assert alone.usage is not None
    assert made.usage.prompt_tokens == alone.usage.prompt_tokens
    calls = made.choices[0].message.tool_calls
    assert calls
    assert {call.function.name for call in calls} == {"other"}
    response: Any = {
        **{"model": "tiny", "input": "x", "max_output_tokens": 60, "temperature": 0},
        "tools": [{"type": "function", **tool["function"]} for tool in (TOOL, OTHER)],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
    }
    found = client.responses.create(**response)
    assert {item.name for item in found.output if item.type == "function_call"} == {"other"}
    assert found.tool_choice.type == "allowed_tools"
    allowed["allowed_tools"]["tools"][0]["function"]["name"] = "none"
    with pytest.raises(openai.BadRequestError, match="not among tools"):
        client.chat.completions.create(**options, tools=[TOOL], tool_choice=allowed)
    showing.idle()


def test_thinking_is_switched_by_a_field_of_its_own(running: Running) -> None:
    body = {"messages": talk("x"), "max_tokens": 1, "return_token_ids": True}
    template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    for given in (True, False):
        asked = ChatRequest.model_validate(body | {"enable_thinking": given, "chat_template": template})
        assert variables_of(asked, None) == {"enable_thinking": given}
    told = running.post("/v1/chat/completions", body | {"enable_thinking": False}).json()
    assert [one["param"] for one in told["warnings"]] == ["enable_thinking"]


def test_older_names_of_grammars_are_known(running: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 0}

    def text(**fields: Any) -> str:
        choice = running.post("/v1/chat/completions", body | fields).json()["choices"][0]
        return str(choice["message"]["content"])

    assert text(guided_choice=["yes", "no"]) == text(structured_outputs={"choice": ["yes", "no"]})
    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(guided_regex="ab+c") == text(structured_outputs={"regex": "ab+c"})
    refused = running.post("/v1/chat/completions", body | {"guided_regex": "a", "structured_outputs": {"regex": "a"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    told = running.post("/v1/chat/completions", body | {"guided_regex": "a", "guided_decoding_backend": "outlines"})
    assert [one["param"] for one in told.json()["warnings"]] == ["guided_decoding_backend"]
    for route, asked in (("chat/completions", body), ("completions", {"prompt": "x", "max_tokens": 2})):
        unread = running.post(f"/v1/{route}", asked | {"vllm_xargs": {"x": 1}})
        assert [one["param"] for one in unread.json()["warnings"]] == ["vllm_xargs"]
