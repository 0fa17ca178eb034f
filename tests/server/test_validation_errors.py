"""What does not fit the schema is told in words for clients: none of Python's, none of the library's."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from beheld.server.errors import HttpError
from beheld.server.pooling_schema import EmbeddingRequest, RerankRequest, ScoreRequest
from beheld.server.read import checked
from beheld.server.schema import ChatRequest, CompletionRequest, TokenizeRequest

HI = {"messages": [{"role": "user", "content": "hi"}]}


def said(value: Any, kind: Any = ChatRequest) -> dict[str, Any]:
    with pytest.raises(HttpError) as caught:
        checked(value, kind)
    assert caught.value.status == 400
    error: dict[str, Any] = caught.value.body()["error"]
    return error


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "The body must be an object. Send an object."),
        ({}, "messages is missing. It must be given."),
        ({"messages": 5}, "messages must be a list. Send a list."),
        ({"messages": []}, "messages has no entry. Send at least one."),
        ({"messages": [3]}, "messages.0 must be an object. Send an object."),
        ({"messages": [{"role": 1}]}, "messages.0.role must be a text. Send a text."),
        ({"messages": [{"role": "x" * 65}]}, "messages.0.role has more than 64 characters. Send a shorter text."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content must be a text or a list. Send a text."),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0 must be an object. Send an object."),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0 has no type. Add its type."),
        (HI | {"max_tokens": 1.5}, "max_tokens must be a whole number. Send a whole number, not as a text."),
        (HI | {"max_tokens": 2**64}, "max_tokens must be less than 18446744073709551616. Send a smaller one."),
        (HI | {"priority": -(2**40)}, "priority must be at least -2147483648. Send a larger one."),
        (HI | {"top_p": float("inf")}, "top_p must be a finite number. Send a smaller one."),
        (HI | {"stop": 5}, "stop must be a text or a list. Send a text."),
        (HI | {"stop": ["x"] * 65}, "stop has more than 64 entries. Send fewer."),
        (HI | {"cache_salt": ""}, "cache_salt is empty. Send a text that is not empty."),
        (HI | {"tool_choice": 5}, "tool_choice must be 'none', 'auto' or 'required' or an object. Send one of these."),
        (
            HI | {"structured_outputs": {"json": 5}},
            "structured_outputs.json must be an object or a text. Send an object.",
        ),
        (
            HI | {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name must match ^[A-Za-z0-9_.-]{1,64}$. Use these characters only.",
        ),
        (
            HI | {"chat_template_kwargs": {"tokenize": 1}},
            "chat_template_kwargs: 'tokenize' is not a template variable. "
            "Leave it out; if it is a field of requests, send it as that.",
        ),
    ],
)
def test_what_is_wrong_and_what_to_send(value: Any, message: str) -> None:
    assert said(value)["message"] == message


def test_a_type_that_is_not_known_is_told_with_those_that_are() -> None:
    error = said({"messages": [{"role": "user", "content": [{"type": "x" * 5000}]}]})
    assert error["message"].startswith("messages.0.content.0 is of an unknown type. Send one of 'text', ")
    assert len(error["message"]) < 400


WEIRD: tuple[Any, ...] = (
    *(None, True, 0, -1, 3.5, 1e308, float("inf"), 2**70, -(2**70), "", "x", "\0", "a" * 5000, "{0}", "{remedy}"),
    *([], [[]], [None], [0], ["x"], [""], [{}], {}, {"a": 1}, {"type": "x"}, {"type": 5}, {"": ""}, {"{}": 1}),
)
WHOLE = HI | {
    **{"model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 1, "temperature": 0.5, "seed": 1},
    **{"stop": ["a"], "stop_token_ids": [1], "logit_bias": {"1": 1.0}, "allowed_token_ids": [1], "bad_words": ["a"]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
    "structured_outputs": {"json": {}, "regex": "a", "choice": ["a"], "grammar": "a"},
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
    **{"tool_choice": {"type": "function", "function": {"name": "f"}}, "chat_template_kwargs": {"a": 1}},
    **{"prompt": [[1]], "logprobs": 1, "echo": True, "input": ["a"], "dimensions": 5, "encoding_format": "float"},
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "auto"}, "uuid": "u"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "t"}, {"type": "image_embeds", "image_embeds": {"a": ""}}],
        },
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
    ],
}
FOREIGN = re.compile(
    r"input should|instance|valid (string|list|dict)|discriminator|\btag\b|does not fit|ctx|[{}]remedy", re.I
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*path, key))


# Of requests with pairs.
SIDES = {
    **{"query": "a", "queries": {"content": [{"type": "text", "text": "t"}]}, "top_n": 1},
    "documents": ["a", {"text": "t"}, {"content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
}
KINDS = (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest, TokenizeRequest)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_wrong_anywhere_has_words(kind: Any) -> None:
    whole = {name: value for name, value in (WHOLE | SIDES).items() if name in kind.model_fields}
    refused = 0
    for path in list(_paths(whole))[1:]:
        for weird in WEIRD:
            value = copy.deepcopy(whole)
            inside: Any = value
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = copy.deepcopy(weird)
            try:
                checked(value, kind)
            except HttpError as error:
                refused += 1
                told = error.body()["error"]
                words = told["message"].replace(told["param"] or "", "")
                assert not FOREIGN.search(words), (path, weird, told)
                assert told["remedy"], told
                assert len(told["message"]) < 1000, told
    assert refused > 100


def test_random_bodies_have_words() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        value = copy.deepcopy(WHOLE)
        for _ in range(3):
            path = chance.choice(list(_paths(value))[1:])
            inside: Any = value
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = copy.deepcopy(chance.choice(WEIRD))
        told = said({name: part for name, part in value.items() if name in (*ChatRequest.model_fields, "prompt")})
        assert told["remedy"], told
        assert not FOREIGN.search(told["message"].replace(told["param"] or "", "")), told
