"""Schemas, tools and thoughts through the official client, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from beheld.api.async_llm import AsyncLLM
from beheld.core.errors import ParamsError
from beheld.core.params import SamplingParams
from beheld.server.answer_marks import AnswerMarks, answer_marks
from beheld.server.app import Service
from beheld.server.chat import ChunkHead, chunks
from beheld.server.chat_order import order_of
from beheld.server.delta_parser import DeltaParser
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ChatRequest
from beheld.server.tools import ToolForm, tool_form, tool_use
from beheld.structured.compile import Compiler, grammar_of
from beheld.text.tools import FORMATS
from tests import tiny
from tests.server.running import ENGINE, Running

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
SMILE = "\N{SLIGHTLY SMILING FACE}"
# Names that no function may have.
NAMES = (
    "a\nb",
    "a\n",
    "\N{SLIGHTLY SMILING FACE}",
    "a\N{ZERO WIDTH JOINER}",
    "",
    "a b",
    "a" * 65,
    "a\0",
    '"',
    "caf\xe9",
)
WRITTEN = (
    'I look.\\n<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"place\\": \\"Rome\\"}}\\n</tool_call>'
)


TALK = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
# How the thoughts of an answer stand at the end of a prompt: told to be none, begun, or left to the model.
CLOSED, OPENED, FREE = ({"chat_template": TALK + end} for end in ("<think>\n\n</think>\n\n", "<think>\n", ""))


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server that reads calls and thoughts; its template tells the model not to think."""
    found = Running("qwen2", ENGINE | CLOSED, tool_parser="hermes", reasoning_parser="think", trust_templates=True)
    yield found
    found.idle()
    found.close()


@pytest.fixture(scope="module")
def client(thinking: Running) -> Iterator[openai.OpenAI]:
    """The synchronous client."""
    with openai.OpenAI(base_url=thinking.url + "/v1", api_key="EMPTY", max_retries=0) as found:
        yield found


def test_an_empty_template_is_refused(thinking: Running) -> None:
    """It would be taken for none."""
    asked = {"messages": [{"role": "user", "content": "?"}], "chat_template": ""}
    answer = thinking.post("/v1/chat/completions", asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template"


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
        {"tools": [{"type": "function", "function": {"name": f"f{k}"}} for k in range(10_000)]},
        {"tools": [{"type": "function", "function": {"name": f"f{k}"}} for k in range(129)]},
        *({"tools": [{"type": "function", "function": {"name": name}}]} for name in NAMES),
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": SMILE}}},
        {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * (1 << 20)}}]},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
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


@pytest.mark.parametrize("where", ["text", "file", "chat_template.json"])
def test_calls_stand_as_the_template_says_wherever_it_stands(tmp_path: Path, where: str) -> None:
    written = TALK + "{% if tools %}<tool_call>{% endif %}"
    for file in tiny.checkpoint("qwen2_vl").iterdir():
        if where != "chat_template.json" or file.name != "chat_template.jinja":
            shutil.copy(file, tmp_path)
    (tmp_path / "talk.jinja").write_text(written)
    if where == "chat_template.json":
        (tmp_path / where).write_text(json.dumps({"chat_template": written}))
    given = {"text": written, "file": str(tmp_path / "talk.jinja")}.get(where)
    llm = AsyncLLM(str(tmp_path), **ENGINE | {"chat_template": given})
    (tmp_path / "talk.jinja").unlink()
    try:
        form = Service(llm, ServerOptions())._forms.calls
        assert asyncio.run(llm.chat_token_ids([{"role": "user", "content": "Hello"}]))
    finally:
        llm.close()
    assert form == ToolForm("hermes", special=False)


def test_52_what_fits_is_taken(thinking: Running) -> None:
    """As many tools as may be, names as long as they may be, and descriptions in any writing."""
    tools = [
        {"type": "function", "function": {"name": f"{k:064}", "description": f"{SMILE}\n\0\u202e"}} for k in range(16)
    ]
    answer = thinking.post("/v1/chat/completions", {**ASK, "tools": tools, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


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


def test_a_required_call_leaves_a_response_format_nothing_to_shape(thinking: Running) -> None:
    asked = {**ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "priority": 3}
    answer = thinking.post("/v1/chat/completions", {**asked, "response_format": {"type": "json_object"}}).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "tides")
    assert [entry["param"] for entry in answer["warnings"]] == ["priority"]


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


YES_NO = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": YES_NO}}},
    {"structured_outputs": {"choice": ["up", "down"]}},
    {"structured_outputs": {"regex": "[ab]{5}"}},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "tides"}}},
]
OPEN, CLOSE, PLAIN = 419, 420, 64


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def musing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server whose tokenizer has the marks of thoughts as tokens, as most models that think have them;
    some call them special, and texts leave special tokens out."""
    folder = tmp_path_factory.mktemp("musing") / "qwen2"
    shutil.copytree(tiny.checkpoint("qwen2"), folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    marks = [AddedToken(mark, special=request.param, normalized=False) for mark in ("<think>", "</think>")]
    tokenizer.add_tokens(marks, special_tokens=request.param)
    assert tokenizer.decode([CLOSE], skip_special_tokens=True) == ("" if request.param else "</think>")
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>", "a"]) == [OPEN, CLOSE, PLAIN]
    tokenizer.save_pretrained(str(folder))
    options: dict[str, Any] = {"tool_parser": "hermes", "reasoning_parser": "think", "trust_templates": True}
    found = Running(folder, ENGINE | FREE, **options)
    with openai.OpenAI(base_url=found.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        yield client
    found.idle()
    found.close()


@pytest.mark.parametrize("prompt", ["begun", "free", "closed"])
@pytest.mark.parametrize("options", GRAMMARS, ids=lambda options: " ".join(options))
def test_a_grammar_begins_behind_the_thoughts(musing: openai.OpenAI, options: dict[str, Any], prompt: str) -> None:
    """The model likes to begin thoughts, and in them one letter, which it tires of."""
    bias = {str(OPEN): 100, str(PLAIN): 75, str(CLOSE): 50}
    asked = {"begun": OPENED, "free": FREE, "closed": CLOSED}[prompt] | options
    found = both(musing, extra_body=asked, frequency_penalty=2, logit_bias=bias, **ASK)
    assert bool(found["thoughts"]) is (prompt != "closed"), found
    assert set(found["thoughts"]) <= {"a"}, found
    text = found["calls"][0]["arguments"] if "tools" in options else found["content"]
    assert re.fullmatch(r'up|down|[ab]{5}|\{ ?"a" ?: ?(true|false) ?\}|\{ ?"place" ?:.*\}', text), found
    assert found["content"] == ("" if "tools" in options else text)


def sequence(*ids: int) -> dict[str, Any]:
    """An answer of just these tokens: as a grammar that says itself how thoughts end."""
    marks = f"# {'</think>'}\n"
    return {"structured_outputs": {"grammar": marks + "start: " + " ".join(f"<[{token}]>" for token in ids)}}


SKIPPED: list[dict[str, Any]] = [{}, {"skip_special_tokens": True}, {"skip_special_tokens": False}]


@pytest.mark.parametrize("skip", SKIPPED, ids=str)
def test_thoughts_end_with_their_mark_whether_special_tokens_are_skipped_or_not(
    musing: openai.OpenAI, skip: dict[str, Any]
) -> None:
    """The marks are tokens, and never shown: in a prompt that has begun the thoughts, and in one that has not."""
    for prompt, ids in ((OPENED, (PLAIN, CLOSE, PLAIN + 1)), (FREE, (OPEN, PLAIN, CLOSE, PLAIN + 1))):
        found = both(musing, extra_body={**prompt, **skip, **sequence(*ids)}, **ASK)
        assert (found["thoughts"], found["content"], found["reason"]) == ("a", "b", "stop")


@pytest.mark.parametrize("skip", SKIPPED, ids=str)
def test_thoughts_end_with_their_mark_without_a_grammar(musing: openai.OpenAI, skip: dict[str, Any]) -> None:
    """One letter until the model tires of it, then the mark, then another letter."""
    bias = {str(PLAIN): 90, str(CLOSE): 80, str(PLAIN + 1): 75}
    asked = {**OPENED, **skip, "logit_bias": bias, "ignore_eos": True}
    found = both(musing, extra_body=asked, presence_penalty=2, frequency_penalty=2, **{**ASK, "max_tokens": 24})
    assert set(found["thoughts"]) == {"a"}
    assert set(found["content"].removeprefix("</think>")) >= {"b"}


def test_thoughts_that_never_end_are_no_answer(musing: openai.OpenAI) -> None:
    grammar = {"structured_outputs": {"choice": ["up"]}, "logit_bias": {str(PLAIN): 100}}
    found = both(musing, extra_body=OPENED | grammar, **{**ASK, "max_tokens": 8})
    assert (found["content"], found["reason"]) == ("", "length")
    assert found["thoughts"]


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


NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}, "then": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["at"],
    "$defs": {"Place": {"type": "object", "properties": {"town": {"enum": ["Oslo"]}}, "required": ["town"]}},
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"at": {"town": "Oslo"}}, True),
        ({"at": {"town": "Oslo"}, "then": {"at": {"town": "Oslo"}, "then": None}}, True),
        ({"at": {"town": "Rome"}}, False),
        ({"at": {"town": "Oslo"}, "then": {"at": 1}}, False),
        ({"at": {"town": "Oslo", "more": 1}}, False),
        ({"at": {"town": "Oslo"}, "more": 1}, False),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_a_tools_schema_may_refer_to_its_own_parts(
    thinking: Running, arguments: dict[str, Any], fits: bool, choice: Any
) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "go", "parameters": NESTED}}]
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": tools, "tool_choice": choice})
    use = tool_use(body, None, 8)
    assert use.grammar is not None
    tokenizer = thinking.llm.get_tokenizer()
    compiler = Compiler(tokenizer.backend_tokenizer.to_str, thinking.llm.info.vocab_size, frozenset({0}))
    written = [{"name": "go", "arguments": arguments}] if choice == "required" else arguments
    ids = tokenizer.encode(json.dumps(written), add_special_tokens=False)
    assert (compiler.matcher(grammar_of(use.grammar)).validate_tokens(ids) == len(ids)) is fits


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "tides"}}])
@pytest.mark.parametrize(("form", "pattern"), [("mistral", "[a-z0-9]{9}"), ("hermes", "call_[a-z0-9]{24}")])
def test_ids_of_calls_are_such_as_the_template_takes_back(
    thinking: Running, choice: Any, form: str, pattern: str
) -> None:
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": TOOLS, "tool_choice": choice})
    use = tool_use(body, tool_form(form, thinking.llm.get_tokenizer()), 8)
    call = {"name": "tides", "arguments": {}}
    written = {"mistral": f"[TOOL_CALLS][{json.dumps(call)}]", "hermes": f"<tool_call>{json.dumps(call)}</tool_call>"}
    text = written[form] if choice == "auto" else json.dumps([call]) if choice == "required" else "{}"
    parser = DeltaParser(None, use.form, use.named, use.schemas, use.max_calls, short_ids=use.short_ids)
    deltas = [*parser.push(text), *parser.finish()]
    (identity,) = (made["id"] for delta in deltas for made in delta.get("tool_calls", ()) if "id" in made)
    assert re.fullmatch(pattern, identity)


def test_strict_functions_leave_room_for_words_and_thoughts(client: openai.OpenAI) -> None:
    found = both(client, tools=strict("tides", "weather"), extra_body=OPENED, **{**ASK, "max_tokens": 6})
    assert found["thoughts"]
    assert found["calls"] == []


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_form_holds_strict_functions_to_their_schemas(thinking: Running, form: str) -> None:
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": strict("tides")})
    use = tool_use(body, tool_form(form, thinking.llm.get_tokenizer()), 8)
    assert use.form == ("json" if form == "llama3_json" else form)
    assert use.grammar is not None
    told = json.loads(use.grammar.calls or "")
    assert told["form"] == form
    assert {tool["name"]: tool["schema"] is not None for tool in told["tools"]} == {"weather": False, "tides": True}


@pytest.mark.parametrize("form", ["lfm2", "deepseek_v3", "openai"])
def test_a_form_without_a_grammar_refuses_strict_functions(thinking: Running, form: str) -> None:
    body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": strict("tides")})
    tokenizer = thinking.llm.get_tokenizer()
    use = tool_use(body, tool_form(form, tokenizer), 8)
    assert use.grammar is not None
    compiler = Compiler(tokenizer.backend_tokenizer.to_str, thinking.llm.info.vocab_size, frozenset({0}))
    with pytest.raises(ParamsError, match=f"call format {form}"):
        compiler.matcher(grammar_of(use.grammar))


def test_what_a_form_cannot_be_held_to_is_refused_by_name(tagged: Running) -> None:
    tool = {"name": "f", "strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "x+"}}}}
    answer = tagged.post("/v1/chat/completions", {**ASK, "tools": [{"type": "function", "function": tool}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools"
    assert "'a' is a text with further rules" in error["message"]
    assert "glm45" in error["message"]


@pytest.fixture(scope="module")
def tagged() -> Iterator[Running]:
    """A server whose model writes calls in tags."""
    found = Running("qwen2", tool_parser="glm45")
    yield found
    found.close()


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
        chat_template: str | None = None
        config = SimpleNamespace(max_model_len=64)

        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def chat(self, messages: Any, params: SamplingParams, *_: Any, **options: Any) -> None:
            asked.append(params)

    def ask(**options: Any) -> None:
        body = ChatRequest.model_validate({"messages": ASK["messages"], "tools": TOOLS, **options})
        head = ChunkHead("x", 0, "m", lambda output, count: None)
        model: Any = Model()
        marks = AnswerMarks(ToolForm("mistral", special=special))
        chunks(model, body, order_of(model, body, ServerOptions(), marks), head, None, marks)

    ask()
    ask(tool_choice="none")
    assert [params.skip_special_tokens for params in asked] == [shown, True]
    if special:
        with pytest.raises(HttpError, match="special token"):
            ask(skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "calls", "thoughts"),
    [
        ({}, "hermes", "<think>"),
        ({"tool_parser": "none", "reasoning_parser": "none"}, None, None),
        ({"tool_parser": "lfm2", "reasoning_parser": "mistral"}, "lfm2", "[THINK]"),
    ],
)
def test_a_family_and_its_template_choose_the_forms(
    thinking: Running, options: dict[str, Any], calls: str | None, thoughts: str | None
) -> None:
    class Model:
        chat_template = TALK + "<tool_call> <think>"
        info = thinking.llm.info
        tokenizer = thinking.llm.tokenizer

    found = answer_marks(Model(), ServerOptions(**options))  # type: ignore[arg-type]
    assert (found.calls and found.calls.name, found.reasoning and found.reasoning.open) == (calls, thoughts)
