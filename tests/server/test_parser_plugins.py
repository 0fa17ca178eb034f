"""Parsers of calls and of reasoning that were written for vLLM, from a file of the operator's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from beheld.cli import serve as command
from beheld.cli.main import main
from beheld.cli.parser import Parser
from beheld.compat.parsers import MarkedReasoningParser
from beheld.core.errors import ConfigError
from beheld.server.options import ServerOptions
from beheld.server.parser_plugins import PluginReader, marks_of
from beheld.text.reasoning import splitter
from beheld.text.tools import Piece
from tests.compat import scripted
from tests.jobs.test_job import MODEL
from tests.server.running import ENGINE, Running

CALLS = """
import json, re
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest, DeltaMessage, ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import AnyTokenizer

@ToolParserManager.register_module(["mine", "ours"])
class Mine(ToolParser):
    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        assert self.vocab

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        if "broken" in model_output:
            raise ValueError("broken")
        names = [tool.function.name for tool in request.tools]
        found = [pair for pair in re.findall(r"<<(.*?):(.*?)>>", model_output) if pair[0] in names]
        if not found:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        calls = [ToolCall(function=FunctionCall(name=one, arguments=json.dumps({"a": a}))) for one, a in found]
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=calls, content=model_output.split("<<")[0] or None)
"""
THOUGHTS = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

@ReasoningParserManager.register_module("seeds")
class Seeds(BaseThinkingReasoningParser):
    @property
    def start_token(self): return "<seed>"
    @property
    def end_token(self): return "</seed>"

@ReasoningParserManager.register_module("own")
class Own(DeepSeekR1ReasoningParser):
    def extract_reasoning(self, model_output, request):
        thought, said = super().extract_reasoning(model_output, request)
        return thought, said and said.upper()

@ReasoningParserManager.register_module("fails")
class Fails(DeepSeekR1ReasoningParser):
    def extract_reasoning(self, model_output, request):
        return model_output.split("</think>")[5], None

@ReasoningParserManager.register_module("nothing")
class Nothing(DeepSeekR1ReasoningParser):
    def extract_reasoning(self, model_output, request):
        return None

ReasoningParserManager.register_module("none", module=type("None_", (), {"__init__": lambda *a: None}))
"""
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plugged_calls.py").write_text(CALLS, encoding="utf-8")
    (folder / "plugged_thoughts.py").write_text(THOUGHTS, encoding="utf-8")
    (folder / "plugged_badly.py").write_text("import no_such_module", encoding="utf-8")
    return folder


def options(*words: str) -> ServerOptions:
    parser = Parser(prog="beheld serve")
    command.add_arguments(parser)
    arguments: argparse.Namespace = parser.parse_args(["mote", *words])
    return command.server_options(arguments, None, {})


def test_a_model_that_is_served_by_another_name_shows_its_own(tmp_path: Path) -> None:
    """Of a folder, the last part alone."""
    parser = Parser(prog="beheld serve")
    command.add_arguments(parser)
    for model, root in (("some/model", "some/model"), (str(tmp_path), tmp_path.name), (None, "mote")):
        found = command.server_options(parser.parse_args([]), model, {"served_model_name": ["other"]})
        assert (found.names, found.root) == (("other",), root)


def plugged(files: Path) -> ServerOptions:
    calls, thoughts = str(files / "plugged_calls.py"), str(files / "plugged_thoughts.py")
    words = ("--tool-parser-plugin", calls, "--tool-call-parser", "ours")
    return options(*words, "--reasoning-parser-plugin", thoughts, "--reasoning-parser", "seeds")


def test_a_server_reads_calls_and_reasoning_with_them(files: Path, tmp_path: Path) -> None:
    scripted.write(tmp_path, ("<seed>", "Hm.", "</seed>", "Look: ", "<<look:here>>"))
    found = plugged(files)
    names = ("tool_parser", "tool_plugin", "reasoning_parser", "reasoning_plugin")
    server = Running(str(tmp_path), ENGINE, **{name: getattr(found, name) for name in names})
    try:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY")
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
        message = client.chat.completions.create(**asked, tools=[TOOL], temperature=0).choices[0].message
        assert (message.content, message.reasoning_content) == ("Look: ", "Hm.")  # type: ignore[attr-defined]
        assert message.tool_calls
        call: Any = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"a": "here"})
        stream = client.chat.completions.create(**asked, tools=[TOOL], temperature=0, stream=True)
        deltas: Any = [choice.delta for chunk in stream for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Look: "
        assert [one.function.name for delta in deltas for one in delta.tool_calls or ()] == ["look", None]
        # Without tools nothing is a call.
        plain = client.chat.completions.create(**asked, temperature=0).choices[0].message
        assert (plain.content, plain.tool_calls) == ("Look: <<look:here>>", None)
        strict = {**TOOL["function"], "strict": True}
        with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
            client.chat.completions.create(**asked, tools=[{"type": "function", "function": strict}])
    finally:
        server.close()


def test_a_job_reads_calls_and_reasoning_with_them(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    scripted.write(tmp_path / "model", ("<seed>", "Hm.", "</seed>", "Look: ", "<<look:here>>"))
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "tools": [TOOL], "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    calls, thoughts = str(files / "plugged_calls.py"), str(files / "plugged_thoughts.py")
    plugins = ["--tool-parser-plugin", calls, "--reasoning-parser-plugin", thoughts]
    names = ["--tool-call-parser", "ours", "--reasoning-parser", "seeds"]
    words = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "-m", str(tmp_path / "model"), *MODEL]
    assert main([*words, *plugins, *names, "--engine", "thread"]) == 0
    made = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["response"]["body"]
    message = made["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Look: ", "Hm.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]
    # Other machines of a cluster have no such file.
    assert main([*words, *plugins, *names, "--resume", "--ray"]) == 1
    assert "Leave out --ray" in capsys.readouterr().err


def test_an_answer_on_which_a_parser_fails_is_text(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = plugged(files).tool_plugin
    assert kind is not None
    reader = PluginReader(kind, Tokenizer(), {"look": {}})
    assert reader.push("bro") == ("", [])
    reader.push("ken <<look:x>>")
    assert reader.finish() == ("broken <<look:x>>", [])
    assert "Mine failed" in caplog.text
    reader = PluginReader(kind, Tokenizer(), {"look": {}})
    reader.push("<<look:x>><<other:y>>")
    words, (piece,) = reader.finish()
    assert (words, piece) == ("", Piece("look", '{"a": "x"}', piece.id))


def test_a_way_of_splitting_of_its_own(files: Path) -> None:
    thoughts = str(files / "plugged_thoughts.py")
    found = options("--reasoning-parser-plugin", thoughts, "--reasoning-parser", "own")
    assert found.reasoning_plugin is not None
    marks = marks_of("own", found.reasoning_plugin, Tokenizer())
    assert (marks.open, marks.close) == ("<think>", "</think>")
    split = splitter(marks, inside=False)
    assert [split.push(text) for text in ("<think>Hm</th", "ink>so")] == [("", "")] * 2
    assert split.finish() == ("Hm", "SO")


@pytest.mark.parametrize("name", ["fails", "nothing"])
def test_an_answer_that_cannot_be_split_is_shown(files: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    thoughts = str(files / "plugged_thoughts.py")
    found = options("--reasoning-parser-plugin", thoughts, "--reasoning-parser", name)
    assert found.reasoning_plugin is not None
    split = splitter(marks_of(name, found.reasoning_plugin, Tokenizer()), inside=False)
    split.push("<think>Hm</think>so")
    assert split.finish() == ("", "<think>Hm</think>so")
    assert "failed on an answer" in caplog.text


def test_a_plug_in_takes_no_modules_place(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(CALLS.replace("import json, re", "import json, re; json.dumps"), encoding="utf-8")
    (tmp_path / "colorsys.py").write_text("import no_such_module", encoding="utf-8")
    before = set(sys.modules)
    assert options("--tool-parser-plugin", str(tmp_path / "json.py"), "--tool-call-parser", "mine").tool_plugin
    assert sys.modules["json"] is json
    with pytest.raises(ConfigError, match="no_such_module"):
        options("--tool-parser-plugin", str(tmp_path / "colorsys.py"), "--tool-call-parser", "mine")
    assert not {name for name in set(sys.modules) - before if "colorsys" in name}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tool-parser-plugin", "plugged_calls.py"), "needs the parser's name"),
        (("--tool-parser-plugin", "plugged_calls.py", "--tool-call-parser", "his"), "It registers: mine, ours"),
        (("--tool-parser-plugin", "plugged_badly.py", "--tool-call-parser", "x"), "no_such_module"),
        (("--tool-parser-plugin", "missing.py", "--tool-call-parser", "x"), "There is no file"),
        (("--tool-parser-plugin", "no_such.module_", "--tool-call-parser", "x"), "cannot be loaded"),
        (("--tool-call-parser", "his"), "--tool-call-parser does not accept 'his'"),
        (("--reasoning-parser", "his"), "--reasoning-parser does not accept 'his'"),
    ],
)
def test_what_cannot_be_loaded_is_told(files: Path, words: tuple[str, ...], said: str) -> None:
    given = [str(files / word) if word.endswith(".py") else word for word in words]
    with pytest.raises(ConfigError, match=said):
        options(*given)


def test_a_parser_of_reasoning_names_its_marks(files: Path) -> None:
    found = options(
        "--reasoning-parser-plugin", str(files / "plugged_thoughts.py"), "--reasoning-parser", "none"
    ).reasoning_plugin
    assert found is not None
    with pytest.raises(ConfigError, match="'none' cannot be made"):
        marks_of("none", found, Tokenizer())


def test_the_base_of_a_reasoning_parser_knows_its_tokens(files: Path) -> None:
    class Known(Tokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {"<seed>": 7, "</seed>": 8}

    kind: Any = plugged(files).reasoning_plugin
    parser = kind(Known())
    assert (parser.start_token_id, parser.end_token_id) == (7, 8)
    assert [parser.is_reasoning_end(ids) for ids in ([1, 8, 2], [8, 7, 1], [], [1])] == [True, False, False, False]
    assert parser.is_reasoning_end_streaming([7, 1, 8], [8])
    assert not parser.is_reasoning_end_streaming([7, 8, 1], [1])
    assert parser.extract_content_ids([7, 1, 8, 2, 8]) == [2, 8]
    assert parser.extract_content_ids([7, 1]) == []
    assert parser.count_reasoning_tokens([0, 7, 1, 7, 2, 8, 3, 8, 4, 8]) == 3
    assert parser.extract_reasoning("<seed></seed>", None) == ("", None)
    # Marks of several tokens are found in the text.
    assert kind(Tokenizer()).end_token_id is None
    with pytest.raises(ValueError, match="model tokenizer must be passed"):
        kind(None)
    unmarked = type("Unmarked", (MarkedReasoningParser,), {})
    with pytest.raises(ValueError, match="Unmarked: start_token and end_token must be defined"):
        unmarked(Tokenizer())
