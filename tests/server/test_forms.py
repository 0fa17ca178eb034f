"""Schemas, tools and thoughts through the official client, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from beheld.core.params import SamplingParams
from beheld.server.chat import Head, chunks
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ChatRequest
from beheld.server.tools import ToolForm, tool_form, tool_use
from beheld.structured.compile import Compiler, grammar_of
from tests.server.running import Running

ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "max_tokens": 200,
    "temperature": 0,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["place", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "tides")
]
WRITTEN = (
    'I look.\\n<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"place\\": \\"Rome\\"}}\\n</tool_call>'
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server that reads calls and thoughts."""
    found = Running("qwen2", tool_parser="hermes", reasoning_parser="think", trust_templates=True)
    yield found
    found.idle()
    found.close()


@pytest.fixture(scope="module")
def client(thinking: Running) -> Iterator[openai.OpenAI]:
    """The synchronous client."""
    with openai.OpenAI(base_url=thinking.url + "/v1", api_key="EMPTY", max_retries=0) as found:
        yield found


def streamed(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """A stream put together by hand: text, thoughts, calls, reason."""
    found: dict[str, Any] = {"content": "", "thoughts": "", "calls": [], "reason": None}
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["thoughts"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["reason"] = choice.finish_reason or found["reason"]
            for call in choice.delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert call.id
                    found["calls"].append({"name": call.function.name, "arguments": ""})
                found["calls"][call.index]["arguments"] += call.function.arguments or ""
    return found


def whole(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    choice = client.chat.completions.create(**options).choices[0]
    calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or []]  # type: ignore[union-attr]
    return {
        "content": choice.message.content or "",
        "thoughts": getattr(choice.message, "reasoning_content", None) or "",
        "calls": calls,
        "reason": choice.finish_reason,
    }


def both(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The same answer in both ways, which must not differ."""
    found = whole(client, **options)
    assert streamed(client, **options) == found
    return found


def test_json_schema_and_json_object(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert set(json.loads(both(client, response_format=form, **ASK)["content"])) == {"a"}
    regex = both(client, extra_body={"structured_outputs": {"regex": "[ab]{5}"}}, **ASK)["content"]
    assert re.fullmatch("[ab]{5}", regex)
    choice = both(client, extra_body={"structured_outputs": {"choice": ["up", "down"]}}, **ASK)["content"]
    assert choice in ("up", "down")


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "xml"}},
        {"structured_outputs": {"regex": "[a"}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tools": [TOOLS[0], TOOLS[0]]},
        {"tools": TOOLS * 100},
        {"tools": [{"type": "function", "function": {"name": "a\nb"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * (1 << 20)}}]},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
            "response_format": {"type": "json_object"},
        },
    ],
)
def test_52_what_does_not_fit_is_refused(thinking: Running, options: dict[str, Any]) -> None:
    answer = thinking.post("/v1/chat/completions", {**ASK, **options})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"]


def test_a_named_function_gets_arguments_that_fit(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "tides"}}
    found = both(client, tools=TOOLS, tool_choice=choice, **ASK)
    (call,) = found["calls"]
    arguments = json.loads(call["arguments"])
    assert call["name"] == "tides"
    assert arguments["place"] in ("Oslo", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert found["reason"] == "tool_calls"
    assert found["content"] == ""


def test_a_required_call_is_made(client: openai.OpenAI) -> None:
    found = both(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **ASK)
    (call,) = found["calls"]
    assert call["name"] in ("weather", "tides")
    assert json.loads(call["arguments"])["place"] in ("Oslo", "Rome")


def test_calls_are_read_out_of_the_text(client: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"grammar": f'start: "{WRITTEN}"'}}
    found = both(client, tools=TOOLS, extra_body=grammar, **ASK)
    assert found["calls"] == [{"name": "weather", "arguments": '{"place": "Rome"}'}]
    assert (found["content"], found["reason"]) == ("I look.", "tool_calls")
    plain = both(client, tools=TOOLS, tool_choice="none", extra_body=grammar, **ASK)
    assert plain["calls"] == []
    assert "<tool_call>" in plain["content"]
    later = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": found["calls"][0]}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    assert both(client, tools=TOOLS, **{**ASK, "messages": later, "max_tokens": 5})["reason"] in ("length", "stop")


def test_thoughts_are_told_apart(client: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "<think>\\nLong ago.\\n</think>\\n\\nBlue."'}}
    found = both(client, extra_body=grammar, **ASK)
    assert (found["thoughts"], found["content"]) == ("Long ago.", "Blue.")


OPENED = {"chat_template": "{{ messages[0]['content'] }}<think>\n"}
YES_NO = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": YES_NO}}},
        {"structured_outputs": {"choice": ["up", "down"]}},
        {"structured_outputs": {"regex": "[ab]{5}"}},
    ],
)
def test_what_follows_a_grammar_is_the_answer_whatever_the_prompt_has_opened(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    found = both(client, extra_body={**OPENED, **options}, **ASK)
    assert found["thoughts"] == ""
    assert re.fullmatch(r'up|down|[ab]{5}|\{ ?"a" ?: ?(true|false) ?\}', found["content"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tides"}}])
def test_calls_that_must_be_made_are_no_thoughts(client: openai.OpenAI, choice: Any) -> None:
    found = both(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, extra_body=OPENED, **ASK)
    (call,) = found["calls"]
    assert json.loads(call["arguments"])["place"] in ("Oslo", "Rome")
    assert (found["thoughts"], found["content"], found["reason"]) == ("", "", "tool_calls")


def test_a_grammar_that_closes_the_thoughts_has_thoughts(client: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "Long ago.</think>Blue."'}}
    found = both(client, extra_body={**OPENED, **grammar}, **ASK)
    assert (found["thoughts"], found["content"]) == ("Long ago.", "Blue.")


def test_one_call_is_told_of_where_calls_may_not_stand_beside_each_other(client: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"grammar": f'start: "{WRITTEN}{WRITTEN}"'}}
    assert len(both(client, tools=TOOLS, extra_body=grammar, **ASK)["calls"]) == 2
    found = both(client, tools=TOOLS, extra_body=grammar, parallel_tool_calls=False, **ASK)
    assert found["calls"] == [{"name": "weather", "arguments": '{"place": "Rome"}'}]


def strict(*names: str) -> list[Any]:
    """The tools, some of them strict."""
    return [{**tool, "function": {**tool["function"], "strict": tool["function"]["name"] in names}} for tool in TOOLS]


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("No call.", True),
        (
            '<think>hm</think>I look.\n<tool_call>\n{"name": "tides", "arguments": {"place": "Rome", "days": 3}}\n'
            "</tool_call>",
            True,
        ),
        ('<tool_call>\n{"name": "tides", "arguments": {"place": "Rome", "days": 99}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "weather", "arguments": {"x": [1]}}\n</tool_call><tool_call>\n{"name": "tides"', True),
    ],
)  # fmt: skip
def test_strict_functions_are_called_as_their_schemas_say(thinking: Running, text: str, fits: bool) -> None:
    body = ChatRequest.model_validate({"messages": [], "tools": strict("tides")} | {"messages": ASK["messages"]})
    tokenizer = thinking.llm.get_tokenizer()
    use = tool_use(body, tool_form("hermes", tokenizer), 8)
    assert use.grammar is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    compiler = Compiler(tokenizer.backend_tokenizer.to_str, thinking.llm.info.vocab_size, frozenset({0}))
    matcher = compiler.matcher(grammar_of(use.grammar))
    assert (matcher.validate_tokens(ids) == len(ids)) is fits


def test_strict_functions_leave_room_for_words_and_thoughts(client: openai.OpenAI) -> None:
    found = both(client, tools=strict("tides", "weather"), extra_body=OPENED, **{**ASK, "max_tokens": 6})
    assert found["thoughts"]
    assert found["calls"] == []


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder", "mistral", "llama3_json", "pythonic"])
def test_a_form_that_knows_no_strictness_says_so(thinking: Running, form: str) -> None:
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": strict("tides")})
    with pytest.raises(HttpError, match="'tides' is strict") as caught:
        tool_use(body, tool_form(form, thinking.llm.get_tokenizer()), 8)
    assert caught.value.body()["error"]["param"] == "tools"


def test_marks_that_are_special_tokens_are_shown(thinking: Running) -> None:
    """A tokenizer may call the marks special, and texts leave special tokens out."""

    class Tokenizer:
        def __init__(self) -> None:
            self.added_tokens_decoder = {
                5: AddedToken("[TOOL_CALLS]", special=True),
                6: AddedToken("<tool_call>", special=False),
            }

    assert tool_form("mistral", Tokenizer()) == ToolForm("mistral", special=True)
    assert tool_form("hermes", Tokenizer()) == ToolForm("hermes", special=False)
    assert tool_form(None, Tokenizer()) is None


@pytest.mark.parametrize(("special", "shown"), [(True, False), (False, True)])
def test_special_tokens_are_left_in_where_calls_begin_with_one(special: bool, shown: bool) -> None:
    asked: list[SamplingParams] = []

    class Model:
        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def chat(self, messages: Any, params: SamplingParams, *_: Any, **options: Any) -> None:
            asked.append(params)

    def ask(**options: Any) -> None:
        body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": TOOLS, **options})
        head = Head("x", 0, "m", lambda output, count: None)
        chunks(Model(), body, ServerOptions(), head, None, ToolForm("mistral", special=special))  # type: ignore[arg-type]

    ask()
    ask(tool_choice="none")
    assert [params.skip_special_tokens for params in asked] == [shown, True]
    if special:
        with pytest.raises(HttpError, match="special token"):
            ask(skip_special_tokens=True)
