"""Tools, choices among them, and calls of them in a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationInfo,
)

from beheld.server import limits
from beheld.server.body_schema import CACHED, Body, Name, wrong
from beheld.server.custom_tools import arguments_of, function_of, held_grammar, not_held
from beheld.server.notes import Notes
from beheld.utils.bounded_json import exceeds

# Clients such as LiteLLM write it into every part of a message.
_MARKED = {"provider_specific_fields": "Templates have no place for it."}


class CalledFunction(Body):
    """The function of a call; its arguments are JSON text."""

    without_effect: ClassVar[Mapping[str, str]] = _MARKED

    says_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"parsed_arguments": ()}

    name: Name
    arguments: str


class ToolCall(Body):
    """An earlier call by the model."""

    without_effect: ClassVar[Mapping[str, str]] = _MARKED

    id: Name | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class CalledCustom(Body):
    """The custom tool of a call, and its input."""

    without_effect: ClassVar[Mapping[str, str]] = _MARKED

    name: Name
    input: str


class CustomCall(Body):
    """An earlier call of a custom tool."""

    without_effect: ClassVar[Mapping[str, str]] = _MARKED

    id: Name | None = None
    type: Literal["custom"]
    index: int | None = None
    custom: CalledCustom


def _as_call(given: ToolCall | CustomCall) -> ToolCall:
    """The call of the function that the model sees in a custom tool's place."""
    if isinstance(given, ToolCall):
        return given
    called = CalledFunction(name=given.custom.name, arguments=arguments_of(given.custom.input))
    return ToolCall(id=given.id, index=given.index, function=called)


def _kind_of_tool(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return CUSTOM if kind == "custom" else ALLOWED if kind == "allowed_tools" else FUNCTION


# Tags of unions that are keys of nothing, so that errors name the client's own fields. What the validators make of such
# a union is a function's form in any case, which the aliases below say.
FUNCTION, CUSTOM, ALLOWED = "type: function", "type: custom", "type: allowed_tools"


if TYPE_CHECKING:
    AnyCall = ToolCall
else:
    AnyCall = Annotated[
        Annotated[ToolCall, Tag(FUNCTION)] | Annotated[CustomCall, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_call),
    ]


# ---------------------------------------------------------------------- tools and formats


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # The grammar of a custom tool's input, in Lark.
    _input: str | None = PrivateAttr(None)

    @property
    def input(self) -> str | None:
        """The grammar that the one argument follows, if this stands for a custom tool with one."""
        return self._input

    def hold_to(self, grammar: str | None) -> None:
        """Let the one argument follow a grammar."""
        self._input = grammar


class Tool(Body):
    """A function among the tools."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["function"]
    function: Function


class InputGrammar(Body):
    """What the input of a custom tool follows."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=1 << 16)]


class CustomFormat(Body):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class Custom(Body):
    """A tool whose input is a text."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    format: CustomFormat | None = None


class ChatCustomTool(Body):
    """A custom tool among the tools."""

    without_effect: ClassVar[Mapping[str, str]] = CACHED

    type: Literal["custom"]
    custom: Custom


class SeenCustom(Tool):
    """The function that the model sees in a custom tool's place; its calls come back as calls of that."""


def _as_tool(given: Tool | ChatCustomTool, info: ValidationInfo) -> Tool:
    if isinstance(given, Tool):
        return given
    own = given.custom
    given_form = None if own.format is None else own.format.grammar
    if own.format is not None and (own.format.type == "grammar") != (given_form is not None):
        raise wrong(f"The format of {own.name} is of the type grammar or has one, not both.", "Send both, or neither.")
    grammar: tuple[str, str] | None = None
    held: str | None = None
    if given_form is not None:
        grammar = (given_form.syntax, given_form.definition)
        held = held_grammar(*grammar)
        if held is None and isinstance(info.context, Notes):
            words = not_held(own.name)
            if info.context.strict:
                raise wrong(words, "Send the tool without a format.")
            info.context.tell("tools", words)
    made = SeenCustom(type="function", function=Function(**function_of(own.name, own.description, grammar)))
    made.function.hold_to(held)
    return made


if TYPE_CHECKING:
    AnyTool = Tool
else:
    AnyTool = Annotated[
        Annotated[Tool, Tag(FUNCTION)] | Annotated[ChatCustomTool, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_tool),
    ]


def bounded_tools(given: Any) -> Any:
    """The tools of a request, unless they are too large together."""
    if exceeds(given, limits.MAX_TOOLS_LETTERS, limits.MAX_TOOLS_VALUES):
        words = f"The tools have more than {limits.MAX_TOOLS_LETTERS} letters or {limits.MAX_TOOLS_VALUES} values"
        raise wrong(words, "Send fewer or smaller ones.")
    return given


class FunctionName(Body):
    """A function by its name."""

    name: Name


class ToolChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class CustomChoice(Body):
    """The one custom tool that must be called."""

    type: Literal["custom"]
    custom: FunctionName


def _as_choice(given: Any) -> Any:
    return ToolChoice(type="function", function=given.custom) if isinstance(given, CustomChoice) else given


if TYPE_CHECKING:
    _Named = ToolChoice
else:
    _Named = Annotated[
        Annotated[ToolChoice, Tag(FUNCTION)] | Annotated[CustomChoice, Tag(CUSTOM)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_choice),
    ]


class AllowedTools(Body):
    """The tools that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Field(min_length=1, max_length=limits.MAX_TOOLS)]


class AllowedChoice(Body):
    """A choice among some of the tools; the model sees no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


if TYPE_CHECKING:
    Choice = ToolChoice | AllowedChoice
else:
    Choice = Annotated[
        Annotated[ToolChoice, Tag(FUNCTION)]
        | Annotated[CustomChoice, Tag(CUSTOM)]
        | Annotated[AllowedChoice, Tag(ALLOWED)],
        Discriminator(_kind_of_tool),
        AfterValidator(_as_choice),
    ]
