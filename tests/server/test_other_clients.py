"""Clients of others, unmodified, get what they expect; `.ci/clients` installs them, and each is skipped without.

With BEHELD_CLIENTS=1, one that is not installed fails.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests import tiny
from tests.server.running import Running

PROMPT = "What is this?"


def imported(name: str) -> Any:
    """A module of a client."""
    return importlib.import_module(name) if os.environ.get("BEHELD_CLIENTS") == "1" else pytest.importorskip(name)


class Place(pydantic.BaseModel):
    """A small object."""

    open: bool


class Trip(pydantic.BaseModel):
    """Go from one place to another."""

    first: Place
    last: Place


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """A server of a text model."""
    running = Running("qwen2")
    yield running
    running.close()


@pytest.fixture(scope="module")
def expected(served: Running) -> str:
    """What the official client gets."""
    with openai.OpenAI(base_url=served.url + "/v1", api_key="EMPTY") as client:
        made = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=8
        )
    text = made.choices[0].message.content
    assert text
    return text


@pytest.mark.filterwarnings("ignore")
def test_langchain(served: Running, expected: str) -> None:
    found = imported("langchain_openai")
    model = found.ChatOpenAI(base_url=served.url + "/v1", api_key="EMPTY", model="tiny", temperature=0, max_tokens=8)
    assert model.invoke(PROMPT).content == expected
    assert "".join(chunk.content for chunk in model.stream(PROMPT)) == expected
    assert [each.content for each in model.batch([PROMPT, PROMPT])] == [expected] * 2
    longer = found.ChatOpenAI(base_url=served.url + "/v1", api_key="EMPTY", model="tiny", max_tokens=200)
    made = longer.with_structured_output(Place, method="json_schema").invoke(PROMPT)
    assert isinstance(made, Place)
    # The schema of a tool has definitions.
    (call,) = longer.bind_tools([Trip], tool_choice="Trip").invoke(PROMPT).tool_calls
    assert Trip(**call["args"])


@pytest.mark.filterwarnings("ignore")
def test_llama_index(served: Running, expected: str) -> None:
    found = imported("llama_index.llms.openai_like")
    chat = imported("llama_index.core.llms")
    model = found.OpenAILike(
        model="tiny", api_base=served.url + "/v1", api_key="EMPTY", is_chat_model=True, temperature=0, max_tokens=8
    )
    messages = [chat.ChatMessage(role="user", content=PROMPT)]
    assert model.chat(messages).message.content == expected
    assert "".join(part.delta for part in model.stream_chat(messages)) == expected
    assert model.complete(PROMPT).text == expected
    caller = found.OpenAILike(
        model="tiny",
        api_base=served.url + "/v1",
        api_key="EMPTY",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=200,
    )
    tool = imported("llama_index.core.tools").FunctionTool.from_defaults(lambda **_: None, name="go", fn_schema=Trip)
    answer = caller.chat_with_tools([tool], user_msg=PROMPT, tool_choice="go")
    (call,) = caller.get_tool_calls_from_response(answer)
    assert Trip(**call.tool_kwargs)


@pytest.mark.filterwarnings("ignore")
def test_litellm(served: Running, expected: str) -> None:
    litellm = imported("litellm")
    ask: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": served.url + "/v1",
        "api_key": "EMPTY",
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == expected
    assert whole.usage.completion_tokens == 8
    parts = litellm.completion(**ask, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    # An answer as the client gave it is taken back.
    ask["messages"] += [whole.choices[0].message.model_dump(), {"role": "user", "content": "And this?"}]
    assert litellm.completion(**ask).choices[0].message.content


@pytest.mark.filterwarnings("ignore")
def test_instructor(served: Running) -> None:
    instructor = imported("instructor")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=served.url + "/v1", api_key="EMPTY"), mode=mode)
        made = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT}],
            response_model=Place,
            max_tokens=64,
            max_retries=0,
        )
        assert isinstance(made, Place)


@pytest.mark.filterwarnings("ignore")
def test_llm(served: Running, expected: str) -> None:
    found = imported("llm.default_plugins.openai_models")
    model = found.Chat("tiny", model_name="tiny", api_base=served.url + "/v1", key="EMPTY")
    model.key = "EMPTY"
    for stream in (False, True):
        answer = model.prompt(PROMPT, stream=stream, temperature=0, max_tokens=8)
        assert answer.text() == expected


@pytest.mark.filterwarnings("ignore")
def test_lm_evaluation_harness(served: Running, expected: str) -> None:
    found = imported("lm_eval.models.openai_completions")
    instance = imported("lm_eval.api.instance").Instance
    folder: Path = tiny.checkpoint("qwen2")
    scorer = found.LocalCompletionsAPI(
        model="tiny",
        base_url=served.url + "/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(folder),
        max_length=256,
    )
    pairs = [("A cat sat on", " the mat"), ("Once upon", " a time")]
    asked = [instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    scores = scorer.loglikelihood(asked, disable_tqdm=True)
    for (context, answer), (value, _) in zip(pairs, scores, strict=True):
        assert value == pytest.approx(_log_likelihood(folder, context, answer), abs=1e-2)
    chat = found.LocalChatCompletion(model="tiny", base_url=served.url + "/v1/chat/completions", tokenizer_backend=None)
    rule = {"until": [], "max_gen_toks": 8, "temperature": 0}
    message = '[{"role": "user", "content": "What is this?"}]'
    json_chat = imported("lm_eval.models.api_models").JsonChatStr
    (text,) = chat.generate_until([instance("generate_until", {}, (json_chat(message), rule), 0)], disable_tqdm=True)
    assert text == expected


def _log_likelihood(folder: Path, context: str, answer: str) -> float:
    """What transformers says of the answer's tokens after the context's."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    before, whole = tokenizer(context).input_ids, tokenizer(context + answer).input_ids
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    value = sum(float(scores[at - 1, whole[at]]) for at in range(len(before), len(whole)))
    assert math.isfinite(value)
    return value
