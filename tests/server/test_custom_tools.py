"""Custom tools of chats: the model sees functions, and the client its own tools."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from beheld.server.custom_tools import CustomCalls, input_of
from beheld.server.delta_parser import DeltaParser
from beheld.server.schema import ChatRequest
from beheld.server.stream import fold
from beheld.server.tools import ToolForm, free_inputs, tool_use
from beheld.text.tools import FORMATS, PLUGGED, CallFormat
from tests.server.running import ENGINE, Running

CHAT = "/v1/chat/completions"
TEXT = "{% for m in messages %}{{ m['content'] }}{{ m['tool_calls'] | tojson if m['tool_calls'] }}{% endfor %}"
TEMPLATE = TEXT + "{% if tools %}{{ tools | tojson }}{% endif %}"
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs it."}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
SEEN = {
    "name": "shell",
    "description": "Runs it.",
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    },
}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    found = Running("llama", ENGINE | {"chat_template": TEMPLATE, "limit_mm_per_prompt": None})
    yield found
    found.close()


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "shell"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "shell"}}]},
        },
    ],
)
def test_a_custom_tool_is_called_with_a_text(server: Running, choice: Any) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY")
    options: Any = {**ASKED, "max_tokens": 40, "tools": [SHELL, OTHER], "tool_choice": choice}
    message = client.chat.completions.create(**options).choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert (call.type, call.custom.name) == ("custom", "shell")
    assert "function" not in call.model_dump(exclude_none=True)
    # The function's arguments hold the same text.
    as_function = {"tools": [{"type": "function", "function": SEEN}, OTHER]}
    named = {"type": "function", "function": {"name": "shell"}}
    inner = client.chat.completions.create(**{**options, **as_function, "tool_choice": named}).choices[0]
    if choice["type"] == "custom":
        assert call.custom.input == input_of(inner.message.tool_calls[0].function.arguments)
        assert call.custom.input
    pieces = [
        piece
        for chunk in client.chat.completions.create(**options, stream=True)
        for one in chunk.choices
        for piece in one.delta.model_dump(exclude_none=True).get("tool_calls", ())
    ]
    first = [piece for piece in pieces if piece["index"] == 0]
    assert (first[0]["id"][:5], first[0]["type"]) == ("call_", "custom")
    assert "".join(piece["custom"]["input"] for piece in first) == call.custom.input
    server.idle()


def test_its_calls_are_taken_back(server: Running) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "shell", "input": 'ls "a"\n'}}
    same = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"input": "ls \\"a\\"\\n"}'}}
    counts = []
    for one in (call, same):
        tail = {"role": "tool", "tool_call_id": "c", "content": "b"}
        messages = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": [one]}, tail]
        tools = [SHELL if one is call else {"type": "function", "function": SEEN}]
        counts.append(server.post("/tokenize", {"messages": messages, "tools": tools}).json()["tokens"])
    assert counts[0] == counts[1]


def formed(syntax: str, definition: str) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "shell", "format": form}}


@pytest.mark.parametrize(
    ("tool", "pattern"),
    [
        (formed("regex", r'^"[a-c]{3,5}\n"$'), r'"[a-c]{3,5}\n"'),
        (formed("lark", 'start: "\\"" WORD ("\\n" WORD)* ";"\nWORD: /[a-c]{1,3}/'), r'"[a-c]{1,3}(\n[a-c]{1,3})*;'),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "custom": {"name": "shell"}}])
def test_the_input_follows_its_grammar(server: Running, tool: dict[str, Any], pattern: str, choice: Any) -> None:
    asked = {**ASKED, "max_tokens": 120, "tools": [tool, OTHER], "tool_choice": choice, "parallel_tool_calls": False}
    found = []
    for seed in range(4):
        answer = server.post(CHAT, {**asked, "temperature": 2, "seed": seed}).json()
        assert "warnings" not in answer
        if answer["choices"][0]["finish_reason"] != "length":
            found += [
                call["custom"]["input"] for call in answer["choices"][0]["message"]["tool_calls"] if "custom" in call
            ]
    assert found
    assert all(re.fullmatch(pattern, text) for text in found)
    flat = {"type": "custom", "name": "shell", "format": {"type": "grammar", **tool["custom"]["format"]["grammar"]}}
    named = choice if choice == "required" else {"type": "custom", "name": "shell"}
    given = {"model": "tiny", "input": "x", "tools": [flat], "tool_choice": named, "max_output_tokens": 120}
    made = server.post("/v1/responses", given).json()
    assert "warnings" not in made
    assert made["status"] == "incomplete" or all(re.fullmatch(pattern, item["input"]) for item in made["output"])


def test_a_grammar_that_cannot_be_followed_is_told(server: Running) -> None:
    asked = {**ASKED, "max_tokens": 1, "tools": [formed("regex", r"\p{Lu}")], "tool_choice": "required"}
    answer = server.post(CHAT, asked)
    assert "may still not follow" in answer.json()["warnings"][0]["message"]
    assert answer.json()["warnings"][0]["param"] == "tools"
    wrong = {**asked, "tools": [formed("lark", "start: nothing")]}
    assert server.post(CHAT, wrong).status_code == 400


@pytest.mark.parametrize(("form", "told"), [("hermes", False), ("llama3_json", False), ("glm45", True)])
def test_whether_the_form_of_calls_holds_them_to_it_is_known(form: str, told: bool) -> None:
    body = ChatRequest.model_validate({**ASKED, "tools": [formed("regex", "a+")]})
    assert free_inputs(body, ToolForm(form, special=False)) == (["shell"] if told else [])
    use = tool_use(body, ToolForm(form, special=False), 8)
    assert (use.grammar is None) == told


def test_a_plug_in_by_the_name_of_a_format_holds_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLUGGED, "hermes", CallFormat(FORMATS["hermes"].reader))
    body = ChatRequest.model_validate({**ASKED, "tools": [formed("regex", "a+")]})
    assert free_inputs(body, ToolForm("hermes", special=False)) == ["shell"]


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}, "colour": 1}]}, "tools.0.colour"),
        ({"tools": [{"type": "function", "function": {"name": "a"}, "colour": 1}]}, "tools.0.colour"),
        ({"tools": [{"type": "mcp"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]}, "tools.0"),
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": 5}}}, "tool_choice.custom.name"),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "colour": 1}}, "tool_choice.colour"),
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": "none"}}}, "tool_choice"),
        ({"tools": [SHELL, {"type": "function", "function": SEEN}]}, "tools"),
    ],
)
def test_what_is_wrong_is_named(server: Running, own: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, {**ASKED, "max_tokens": 1, **own})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_among_others(step: int) -> None:
    """Of an answer with calls of both kinds, each comes in its own form, in any cut of the stream."""
    calls = [{"name": "shell", "arguments": {"input": "ls"}}, {"name": "other", "arguments": {"a": 1}}]
    text = "Hm." + "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in [*calls, calls[0]])
    parser = DeltaParser(None, "hermes")
    reader = CustomCalls(frozenset({"shell"}))
    deltas = []
    for begin in range(0, len(text), step):
        deltas += list(reader.read(parser.push(text[begin : begin + step]), ended=False))
    deltas += list(reader.read(parser.finish(), ended=True))

    async def chunks() -> Any:
        for delta in deltas:
            yield {"choices": [{"index": 0, "delta": delta}]}

    async def whole() -> dict[str, Any]:
        return await fold(chunks(), "chat.completion")

    message = asyncio.run(whole())["choices"][0]["message"]
    assert message["content"] == "Hm."
    found = message["tool_calls"]
    assert [one["type"] for one in found] == ["custom", "function", "custom"]
    assert [one["custom"] for one in found if "custom" in one] == [{"name": "shell", "input": "ls"}] * 2
    assert json.loads(found[1]["function"]["arguments"]) == {"a": 1}
