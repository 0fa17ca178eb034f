"""What clients are told, and what their own words mean: names of fields, remedies, echoes, bytes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.running import Running, talk
from tests.server.test_refusals import refused

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "param", "remedy"),
    [
        (HI | {"max_tokens": 0}, "max_tokens", "default"),
        (HI | {"stop": ""}, "stop", "nowhere"),
        (HI | {"best_of": 2}, "best_of", "n answers"),
        (HI | {"max_token": 5}, "max_token", "'max_tokens'"),
        (HI | {"{max}": 5}, "{max}", "Leave it out"),
        (HI | {"temperature": "0"}, "temperature", "not as a text"),
        (HI | {"n": 99}, "n", "fewer"),
        (
            HI | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
            "",
        ),
        (HI | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
        (HI | {"structured_outputs": {"regex": "("}}, "structured_outputs", ""),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "'content'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "must be given"),
        (user({"type": "text", "text": 5}), "messages.0.content.0.text", "Send a text"),
        (user({"type": "text"}), "messages.0.content.0.text", "must be given"),
        (user({"type": "words", "text": "x"}), "messages.0.content.0", "'text', 'input_text'"),
        (
            user({"type": "input_audio", "input_audio": {"data": "", "format": "midi"}}),
            "messages.0.content.0.input_audio.format",
            "",
        ),
        (HI | {"chat_template_kwargs": {"return_dict": True}}, "chat_template_kwargs", "Leave it out"),
        (HI | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "Leave it out"),
        (HI | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "Leave it out"),
        (HI | {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "letters"),
    ],
)
def test_a_refusal_names_the_field_and_a_remedy(running: Running, body: Any, param: str, remedy: str) -> None:
    error = refused(running.post(CHAT, body), 400, param)
    assert remedy in error["remedy"]
    assert error["remedy"] in error["message"]


def test_an_answer_can_be_sent_back_as_it_is(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
    first = client.chat.completions.create(model="tiny", messages=HI["messages"], max_tokens=3)  # type: ignore[arg-type]
    for message in (first.choices[0].message, first.choices[0].message.model_dump()):
        messages: Any = [*HI["messages"], message, *HI["messages"]]
        assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).choices
    silent = {"store": False, "service_tier": "auto", "metadata": None, "modalities": ["text"], "best_of": 1}
    assert running.post(CHAT, HI | silent | {"max_tokens": 1}).status_code == 200
    assert running.post(COMPLETE, {"prompt": "x", "max_tokens": 1, "suffix": None}).status_code == 200
    told = {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]}
    cited = running.post(CHAT, {"messages": [*HI["messages"], told], "max_tokens": 1}).json()
    assert [warning["param"] for warning in cited["warnings"]] == ["annotations"]


def test_a_refusal_of_before_is_words(running: Running) -> None:
    def ids(message: dict[str, Any]) -> list[int]:
        found: list[int] = running.post("/tokenize", {"messages": [*talk(), message, *talk()]}).json()["tokens"]
        return found

    plain = ids({"role": "assistant", "content": "I will not."})
    assert ids({"role": "assistant", "content": None, "refusal": "I will not."}) == plain
    # Found by schemathesis: an empty list is no content either.
    assert ids({"role": "assistant", "content": [], "refusal": "I will not."}) == plain
    part = {"type": "refusal", "refusal": "I will not."}
    assert ids({"role": "assistant", "content": [part]}) == ids(
        {"role": "assistant", "content": [{"type": "text", "text": "I will not."}]}
    )
    refused(running.post(CHAT, {"messages": [{"role": "assistant", "content": "x", "refusal": "y"}]}), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_what_the_model_saw(running: Running, stream: bool) -> None:
    def text(**body: Any) -> list[str]:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        common: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0, "echo": True, **body}
        if not stream:
            return [choice.text for choice in client.completions.create(**common).choices]
        found: dict[int, str] = {}
        for chunk in client.completions.create(stream=True, **common):
            for choice in chunk.choices:
                found[choice.index] = found.get(choice.index, "") + choice.text
        return [found[index] for index in sorted(found)]

    prompts = ["a small cat", "two large dogs"]
    ids = [running.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    spelt = [running.post("/detokenize", {"tokens": one}).json()["prompt"] for one in ids]
    for given, shown in zip(text(prompt=ids), spelt, strict=True):
        assert given.startswith(shown)
        assert len(given) >= len(shown)
    assert text(prompt=prompts)[1].startswith("two large dogs")
    last = running.post("/detokenize", {"tokens": ids[0][-1:]}).json()["prompt"]
    (cut,) = text(prompt=prompts[0], extra_body={"truncate_prompt_tokens": 1})
    assert cut.startswith(last)
    assert not cut.startswith(prompts[0])


def test_bytes_of_tokens_add_up_to_the_text(running: Running) -> None:
    """A byte-level vocabulary spells what it has no token for in parts of characters."""
    ids = running.post("/tokenize", {"prompt": "\U0001f9ff"}).json()["tokens"]
    assert len(ids) > 1, "the test wants a character of several tokens"
    found = b""
    for token in ids:
        body = HI | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "logit_bias": {str(token): 100}}
        choice = running.post(CHAT, body | {"temperature": 0, "ignore_eos": True}).json()["choices"][0]
        (entry,) = choice["logprobs"]["content"]
        found += bytes(entry["bytes"])
    assert found.decode() == "\U0001f9ff"
