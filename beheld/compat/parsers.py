"""What parsers of calls and of reasoning that were written for vLLM import: base classes, registries and records.

`beheld serve --tool-parser-plugin FILE` and `--reasoning-parser-plugin FILE` load such files. The server gives a parser
whole answers, so of vLLM's methods it calls those for whole answers alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from beheld.core.errors import ConfigError

Kind = TypeVar("Kind", bound=type)


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)


class FunctionCall(_Record):
    """The function of a call; its arguments are JSON."""

    id: str | None = Field(default=None, exclude=True)
    name: str
    arguments: str


class ReadCall(_Record):
    """A call."""

    id: str = Field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(_Record):
    """A piece of the function of a call."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(_Record):
    """A piece of a call."""

    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(_Record):
    """A piece of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(_Record):
    """What a parser found in an answer."""

    tools_called: bool
    tool_calls: list[ReadCall]
    content: str | None = None


class FunctionDefinition(_Record):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(_Record):
    """A tool of a request."""

    type: str = "function"
    function: FunctionDefinition


class ChatCompletionRequest(_Record):
    """What a parser may know of a request: the functions that it offers."""

    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] | None = None


class ParsedResponsesRequest(ChatCompletionRequest):
    """The same of a request of the Responses API."""


class _Parser:
    """What both kinds have: the tokenizer."""

    def __init__(self, tokenizer: Any, *given: Any, **options: Any) -> None:
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The tokenizer's tokens and their ids."""
        return dict(self.model_tokenizer.get_vocab())


class ToolParser(_Parser):
    """Finds calls in an answer; a plug-in overrides `extract_tool_calls`."""

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__(tokenizer)
        self.tools = list(tools or ())
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    def adjust_request(self, request: Any) -> Any:
        """The request as it is; vLLM's parsers change it here. Marks that are special tokens stay in texts anyway."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls of a whole answer."""
        raise NotImplementedError

    def extract_tool_calls_streaming(self, *given: Any, **named: Any) -> DeltaMessage | None:
        """Not called: parsers get whole answers."""
        raise NotImplementedError


class ReasoningParser(_Parser):
    """Splits an answer into reasoning and the rest; a plug-in names its marks, and may override how it splits."""

    @property
    def reasoning_start_str(self) -> str | None:
        """The mark that begins reasoning."""
        return getattr(self, "start_token", None)

    @property
    def reasoning_end_str(self) -> str | None:
        """The mark that ends reasoning."""
        return getattr(self, "end_token", None)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Reasoning and answer of a whole text: without the end's mark, all is reasoning."""
        begin, end = self.reasoning_start_str or "", self.reasoning_end_str or ""
        before, mark, after = model_output.removeprefix(begin).partition(end)
        return (before, after or None) if mark else (model_output.removeprefix(begin), None)


class MarkedReasoningParser(ReasoningParser):
    """One whose `start_token` and `end_token` delimit reasoning.

    Raises:
        ValueError: it has no tokenizer, or names no marks.
    """

    start_token: str = ""
    end_token: str = ""

    def __init__(self, tokenizer: Any, *given: Any, **options: Any) -> None:
        super().__init__(tokenizer)
        name = type(self).__name__
        if not tokenizer:
            raise ValueError(f"{name}: the model tokenizer must be passed first.")
        if not self.start_token or not self.end_token:
            raise ValueError(f"{name}: start_token and end_token must be defined.")

    @cached_property
    def start_token_id(self) -> int | None:
        """The id of the first mark; None if it is no token, which is no hindrance: texts are split."""
        return self.vocab.get(self.start_token)

    @cached_property
    def end_token_id(self) -> int | None:
        """The same of the second mark."""
        return self.vocab.get(self.end_token)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last mark among the tokens ends reasoning."""
        marks = (self.start_token_id, self.end_token_id)
        return next((token == marks[1] for token in reversed(input_ids) if token in marks), False)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        """Whether reasoning ends among the newest tokens."""
        return self.end_token_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens after the first mark that ends reasoning."""
        end = self.end_token_id
        return input_ids[input_ids.index(end) + 1 :] if end is not None and end in input_ids else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of tokens between the marks, which may be nested."""
        depth = count = 0
        for token in token_ids:
            if token == self.start_token_id:
                depth += 1
            elif token == self.end_token_id:
                depth = max(0, depth - 1)
            else:
                count += depth > 0
        return count


class DeepSeekR1ReasoningParser(MarkedReasoningParser):
    """Reasoning between <think> and </think>."""

    start_token = "<think>"
    end_token = "</think>"


class Qwen3ReasoningParser(DeepSeekR1ReasoningParser):
    """The same."""


class Registry:
    """A registry: name -> class, and a decorator that registers."""

    def __init__(self) -> None:
        self.kinds: dict[str, type] = {}

    def register_module(
        self, name: str | list[str] | None = None, force: bool = True, module: type | None = None
    ) -> type | Callable[[Kind], Kind]:
        """Register a class under one name or several; its own if none is given. Without `module`, a decorator."""

        def register(kind: Kind) -> Kind:
            names = [kind.__name__] if name is None else [name] if isinstance(name, str) else list(name)
            self.kinds.update(dict.fromkeys(names, kind))
            return kind

        return register if module is None else register(module)

    def found(self, name: str) -> type:
        """The parser of that name.

        Raises:
            ConfigError: none is registered.
        """
        if name not in self.kinds:
            known = ", ".join(sorted(self.kinds)) or "none"
            raise ConfigError(f"The plug-in registers no parser {name!r}.", f"It registers: {known}.", param=name)
        return self.kinds[name]

    # vLLM's names, of which each kind of parser has one.
    get_tool_parser = get_reasoning_parser = found


TOOL_PARSERS = Registry()
REASONING_PARSERS = Registry()
