"""What vLLM's tests of parsers import: its parsers' names over beheld's readers, and the records that they exchange."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, Field

from beheld.cli.vllm_flags import SAME
from beheld.compat import parsers
from beheld.server.delta_parser import DeltaParser
from beheld.text import reasoning, tools

_TABLE = re.compile(r'"([\w.-]+)":\s*\((?:\s*#[^\n]*)?\s*"(\w+)",[^"]*"(\w+)"', re.DOTALL)
# Marks of every format: each is one token of the stand-in for the real tokenizers.
_MARKS = re.compile(r"<\|?[｜/\w▁:|]+[|｜]?>|\[/?[A-Z_]{3,}\]")


class _Skipping(BaseModel):
    """A record whose further attributes are vLLM's own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not name.startswith("_"):
                pytest.skip(f"inside vLLM: {type(self).__name__}.{name}")
            raise


class FunctionCall(_Skipping, parsers.FunctionCall):
    """The function of a call."""


class ToolCall(_Skipping, parsers.ReadCall):
    """A call."""

    function: FunctionCall


class DeltaFunctionCall(_Skipping, parsers.DeltaFunctionCall):
    """A piece of the function of a call."""


class DeltaToolCall(_Skipping, parsers.DeltaToolCall):
    """A piece of a call."""

    function: DeltaFunctionCall | None = None


class DeltaMessage(_Skipping, parsers.DeltaMessage):
    """A piece of a message."""

    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(_Skipping, parsers.ExtractedToolCallInformation):
    """A message."""

    tool_calls: list[ToolCall]


class FunctionDefinition(_Skipping, parsers.FunctionDefinition):
    """A function that may be called."""


class ChatCompletionToolsParam(_Skipping, parsers.ChatCompletionToolsParam):
    """A tool of a request for a chat."""

    function: FunctionDefinition


class ChatCompletionRequest(_Skipping, parsers.ChatCompletionRequest):
    """A request for a chat."""

    messages: list[Any] = Field(default_factory=list)
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True
    structured_outputs: Any = None
    response_format: Any = None
    model: str | None = None


class ResponsesRequest(_Skipping, parsers.ParsedResponsesRequest):
    """A request of the Responses API."""

    input: Any = None
    text: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True
    structured_outputs: Any = None
    model: str | None = None


class _All(dict[str, Any]):
    """The schemas of functions, any of which may be called."""

    def __contains__(self, name: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"inside vLLM: {cls.__name__}.{name}")


class _Inside(metaclass=_Class):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip(f"inside vLLM: {type(self).__name__}.{name}")


class ToolParser(_Inside):
    """One of vLLM's parsers of calls, over the format of the same name."""

    form: ClassVar[str | None] = None

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None, **_: Any) -> None:
        if self.form is None:
            pytest.skip(f"absent: the format of {type(self).__name__}")
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())
        self._parser: DeltaParser | None = None
        self._seen = ""
        self._later: list[dict[str, Any]] = []
        # The index of the last call that has begun.
        self.current_tool_id = -1

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's."""
        return dict(self.model_tokenizer.get_vocab())

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Read a whole answer."""
        parser = self._made(request)
        message = _whole([*parser.push(model_output), *parser.finish()])
        calls = [
            ToolCall(id=call["id"], function=FunctionCall(**call["function"])) for call in message.get("tool_calls", ())
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=message.get("content") or None
        )

    def extract_tool_calls_streaming(self, *words: Any, **named: Any) -> DeltaMessage | None:
        """Read a piece of an answer."""
        names = ("previous_text", "current_text", "delta_text", "previous_token_ids", "current_token_ids")
        given = dict(zip((*names, "delta_token_ids", "request"), words, strict=False)) | named
        # Some tests give the pieces alone.
        alone = given["delta_text"] and not given["previous_text"] and not given["current_text"]
        if self._parser is None or not (alone or given["current_text"] == self._seen + given["delta_text"]):
            self._parser, self._later = self._made(given.get("request")), []
            if not given["previous_text"]:
                given["delta_text"] = given["current_text"] or given["delta_text"]
        self._seen = given["current_text"]
        return self._message([*self._later, *self._parser.push(given["delta_text"])])

    def finish(self) -> DeltaMessage | None:
        """The rest of an answer that came in pieces."""
        parser, self._parser = self._parser, None
        return None if parser is None else _delta([*self._later, *parser.finish()])

    def _message(self, deltas: list[dict[str, Any]]) -> DeltaMessage | None:
        """One message for a piece: what follows the beginning of a call that goes on waits for the next piece.

        The server sends the beginning in a chunk of its own.
        """
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        names = [k for k, delta in enumerate(deltas) if any("id" in call for call in delta.get("tool_calls", ()))]
        self.current_tool_id = max([self.current_tool_id, *(call["index"] for call in calls)])
        cut = len(deltas)
        if names and not _is_whole(
            "".join(c["function"]["arguments"] for c in calls if c["index"] == calls[-1]["index"])
        ):
            cut = names[-1] + 1
        self._later = deltas[cut:]
        return _delta(deltas[:cut])

    def _made(self, request: Any) -> DeltaParser:
        schemas = _All()
        for tool in (*(getattr(request, "tools", None) or ()), *self.tools):
            for function in _functions(tool):
                schemas[function["name"]] = function.get("parameters") or {}
        assert self.form is not None
        return DeltaParser(None, self.form, schemas=schemas, short_ids=tools.FORMATS[self.form].short_ids)


class ReasoningParser(_Inside):
    """One of vLLM's parsers of reasoning, over the format of the same name.

    It takes an answer for reasoning from its beginning where vLLM's does: there the template opens the reasoning.
    """

    form: ClassVar[str | None] = None
    inside: ClassVar[bool] = False
    calls: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tokenizer: Any, *_: Any, **options: Any) -> None:
        if self.form is None:
            pytest.skip(f"absent: the reasoning of {type(self).__name__}")
        self.model_tokenizer = tokenizer
        self._words = options.get("chat_template_kwargs") or {}
        self._effort = options.get("reasoning_effort")
        self._split: reasoning.Splitter | None = None
        self._later = ""
        # Some helpers want reasoning and answer in messages of their own, as our chunks have them.
        self.apart = False

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's."""
        return dict(self.model_tokenizer.get_vocab())

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        """Split a whole answer."""
        self._words = getattr(request, "chat_template_kwargs", None) or self._words
        split = self._made()
        first, rest = split.push(model_output), split.finish()
        return first[0] + rest[0] or None, first[1] + rest[1] or None

    def extract_reasoning_streaming(self, *words: Any, **named: Any) -> DeltaMessage | None:
        """Split a piece of an answer."""
        given = dict(zip(("previous_text", "current_text", "delta_text"), words, strict=False)) | named
        if self._split is None or not given["previous_text"]:
            self._split, self._later = self._made(), ""
            # Some tests begin in the middle.
            self._split.push(given["previous_text"] or "")
        thought, said = self._split.push(given["delta_text"])
        self._later += said
        return self._message((thought, "" if thought and self.apart else self._take()))

    def finish(self) -> DeltaMessage | None:
        """The rest of an answer that came in pieces."""
        split, self._split = self._split, None
        thought, said = ("", "") if split is None else split.finish()
        self._later += said
        return self._message((thought, self._take()))

    def _take(self) -> str:
        said, self._later = self._later, ""
        return said

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the next letter would be no reasoning."""
        split = self._made()
        assert self.form is not None
        if reasoning.FORMATS[self.form].channels:
            pytest.skip("inside vLLM: tokens of a prompt with channels")
        text = self._text(input_ids)
        if reasoning.FORMATS[self.form].joined:
            return reasoning.FORMATS[self.form].close in text
        # Earlier turns are no part of the answer.
        split.push(text[max(0, text.rfind(reasoning.FORMATS[self.form].open)) :])
        return bool(split.push("x")[1])

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        """The same, and not while the answer may still turn out to begin with reasoning."""
        split = self._made()
        split.push(self._text(input_ids))
        return not (input_ids and split.undecided) and self.is_reasoning_end(input_ids)

    @property
    def reasoning_end_token_ids(self) -> list[int]:
        """The token of the closing mark."""
        assert self.form is not None
        return [self.vocab[reasoning.FORMATS[self.form].close]]

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        """The tokens of what is no reasoning."""
        answer = (self.extract_reasoning(self._text(input_ids))[1] or "").strip()
        ids = [each for each in input_ids if isinstance(each, int)]
        return next((ids[k:] for k in range(len(ids), -1, -1) if self._text(ids[k:]).strip() == answer), [])

    def _text(self, ids: Sequence[int]) -> str:
        known = [each for each in ids if isinstance(each, int)]
        text = self.model_tokenizer.decode(known) if known else ""
        return text if isinstance(text, str) else pytest.skip("inside vLLM: a mock of the tokenizer")

    def _message(self, parts: tuple[str, str]) -> DeltaMessage | None:
        return DeltaMessage(reasoning=parts[0] or None, content=parts[1] or None) if any(parts) else None

    def _made(self) -> reasoning.Splitter:
        assert self.form is not None
        marks = reasoning.FORMATS[self.form]
        inside = self._words.get("enable_thinking", self._words.get("thinking", self.inside))
        effort = self._words.get("reasoning_effort") or self._effort
        # Templates of MiniMax-M3 and Hy3 open the reasoning where these ask for it.
        asked = self._words.get("thinking_mode") == "enabled" or (effort or "no_think") != "no_think"
        inside = inside or (asked and self.form in ("minimax_m3", "think"))
        # A template that always opens the reasoning says so at the end of the prompt, which the server reads.
        template = getattr(self.model_tokenizer, "chat_template", None) or ""
        inside = inside or template.endswith(f"{{{{- '{marks.open}' -}}}}")
        nonempty = bool(self._words.get(reasoning.NONEMPTY))
        return reasoning.splitter(marks, inside=inside, calls=self.calls, nonempty=nonempty)


class BaseThinkingReasoningParser(parsers.MarkedReasoningParser):
    """The base of plug-ins, whose texts the server splits at the marks that they name."""

    apart = False

    def extract_reasoning_streaming(self, *words: Any, **named: Any) -> DeltaMessage | None:
        """Split a piece of an answer, as the server does."""
        given = dict(zip(("previous_text", "current_text", "delta_text"), words, strict=False)) | named
        if not given["previous_text"]:
            marks = reasoning.ReasoningMarks(self.start_token, self.end_token, (self.start_token, self.end_token))
            self._split = reasoning.splitter(marks, inside=True)
        return self._of(self._split.push(given["delta_text"]))

    def finish(self) -> DeltaMessage | None:
        """The rest of an answer that came in pieces."""
        return self._of(self._split.finish())

    def _of(self, parts: tuple[str, str]) -> DeltaMessage | None:
        return DeltaMessage(reasoning=parts[0] or None, content=parts[1] or None) if any(parts) else None


def finishing(feed: Callable[..., Any]) -> Callable[..., Any]:
    """A helper of vLLM's that feeds a parser piece by piece, and then adds the rest, which vLLM's parsers have not."""

    def fed(parser: Any, *words: Any, **named: Any) -> Any:
        parser.apart = True
        made = feed(parser, *words, **named)
        rest = parser.finish()
        if rest is not None:
            made.append_delta(rest)
        return made

    return fed


def _functions(tool: Any) -> list[dict[str, Any]]:
    """The functions of a tool, which may be a namespace of several."""
    given = tool if isinstance(tool, dict) else tool.model_dump()
    inner = given.get("tools") or [given.get("function", given)]
    return [each for each in inner if "name" in each]


def _is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except ValueError:
        return False
    return True


def _whole(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if "content" in delta:
            message["content"] = message.get("content", "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message | {"tool_calls": calls}


def _delta(deltas: list[dict[str, Any]]) -> DeltaMessage | None:
    if not deltas:
        return None
    content = "".join(delta.get("content", "") for delta in deltas)
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    calls: list[DeltaToolCall] = []
    for piece in pieces:
        if calls and calls[-1].index == piece["index"]:
            function = calls[-1].function
            assert function is not None
            function.arguments = (function.arguments or "") + piece["function"]["arguments"]
        else:
            calls.append(DeltaToolCall(**piece))
    return DeltaMessage(content=content or None, tool_calls=calls)


@cache
def _registered(folder: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, class) of vLLM's table of parsers."""
    text = (Path(os.environ["PEER_SOURCE"]) / "vllm" / folder / "__init__.py").read_text(encoding="utf-8")
    return {name: (module, kind) for name, module, kind in _TABLE.findall(text)}


# Formats that another parser's reader reads, and templates that open the reasoning themselves.
_TOOLS = SAME["tool-call-parser"]
_REASONING = SAME["reasoning-parser"]
_INSIDE = frozenset(
    (
        *("deepseek_r1", "qwen3", "glm45", "holo2", "nemotron_v3", "step3", "step3p5", "minimax_m2", "kimi_k2"),
        *("ernie45", "olmo3", "granite_thinking_parser", "minimax_m2_append_think"),
    )
)


_MADE: dict[str, Any] = {}


def tool_parser(name: str) -> type[ToolParser]:
    """The parser of calls of that name."""
    own = name if name in tools.FORMATS else _TOOLS.get(name)
    kind = _registered("tool_parsers").get(name, ("", name))[1]
    return _MADE.setdefault(kind, type(kind, (ToolParser,), {"form": own}))


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of reasoning of that name."""
    own = name if name in reasoning.FORMATS else _REASONING.get(name)
    kind = _registered("reasoning").get(name, ("", name))[1]
    calls = () if own != "think" else ("<tool_call>", "<|tool_calls_section_begin|>")
    known = {"form": own, "inside": name in _INSIDE, "calls": calls}
    return _MADE.setdefault(kind, type(kind, (ReasoningParser,), known))


class ToolParserManager:
    """Finds parsers of calls."""

    get_tool_parser = staticmethod(tool_parser)


class ReasoningParserManager:
    """Finds parsers of reasoning."""

    get_reasoning_parser = staticmethod(reasoning_parser)


def attribute(module: str, name: str) -> Any:
    """What a module of vLLM holds under a name; None if it is not here."""
    makers: dict[str, Callable[[str], Any]] = {"tool_parsers": tool_parser, "reasoning": reasoning_parser}
    for folder, make in makers.items():
        if module.startswith((f"vllm.{folder}", "vllm.parser.engine.registered_adapters")):
            found = next((parser for parser, (_, kind) in _registered(folder).items() if kind == name), None)
            if found is not None:
                return make(found)
    return _NAMES[name] if name in _NAMES else _constant(module, name)


@cache
def _constant(module: str, name: str) -> Any:
    """A text that a module of parsers assigns to a name, such as a mark; None if it is anything else."""
    file = Path(os.environ["PEER_SOURCE"]) / f"{module.replace('.', '/')}.py"
    if not name.isupper() or not file.is_file():
        return None
    found = re.search(rf"^{name}(?:: *str)? = (\"[^\n]*\"|'[^\n]*')$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else ast.literal_eval(found[1])


def detokenize_incrementally(
    tokenizer: Any, all_input_ids: list[int], prev_tokens: Any, prefix_offset: int, read_offset: int, *_: Any, **__: Any
) -> tuple[list[str], str, int, int]:
    """The text of the last token; `prefix_offset` counts the letters that were returned."""
    text = tokenizer.decode(all_input_ids)
    tokens = tokenizer.convert_ids_to_tokens(all_input_ids if prev_tokens is None else all_input_ids[-1:])
    if text.endswith("\N{REPLACEMENT CHARACTER}"):
        return tokens, "", prefix_offset, read_offset
    return tokens, text[prefix_offset:], len(text), read_offset


_NAMES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        detokenize_incrementally,
        *(FunctionCall, ToolCall, DeltaFunctionCall, DeltaToolCall, DeltaMessage, ExtractedToolCallInformation),
        *(FunctionDefinition, ChatCompletionToolsParam, ChatCompletionRequest, ResponsesRequest),
        *(ToolParser, ReasoningParser, ToolParserManager, ReasoningParserManager, BaseThinkingReasoningParser),
    )
}


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer, made of the tests' own text, that stands for every model's; its marks are tokens."""
    import tokenizers
    import transformers

    texts = [
        path.read_text(encoding="utf-8")
        for folder in ("tool_parsers", "reasoning")
        for path in sorted((Path(os.environ["PEER_SOURCE"]) / "tests" / folder).glob("*.py"))
    ]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    marks = sorted({mark for text in texts for mark in _MARKS.findall(text)})
    fast.add_tokens(marks)
    fast.clean_up_tokenization_spaces = False
    return fast
