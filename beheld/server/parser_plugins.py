"""Parsers of the operator's own: how the server asks those that were written for vLLM.

They get whole answers: a stream shows calls, and the text around them, at its end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from beheld.core.errors import ConfigError
from beheld.text.reasoning import ReasoningMarks
from beheld.text.tools import PLUGGED, CallFormat, Piece, Schemas
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def add_format(name: str, kind: type, tokenizer: Any) -> str:
    """Make the class readable as a format of calls; returns the format's name, which no other has."""
    own = f"plugin:{name}"
    PLUGGED[own] = CallFormat(lambda schemas: PluginReader(kind, tokenizer, schemas))
    return own


def marks_of(name: str, kind: type, tokenizer: Any) -> ReasoningMarks:
    """The marks of the reasoning that the class reads, and how it splits, if it has a way of its own.

    Raises:
        ConfigError: it names no marks.
    """
    try:
        made = kind(tokenizer)
        begin, end = made.reasoning_start_str, made.reasoning_end_str
    except Exception as error:
        raise ConfigError(
            f"The reasoning parser {name!r} cannot be made: {type(error).__name__}: {error}", param="reasoning_parser"
        ) from error
    if not begin or not end:
        raise ConfigError(
            f"The reasoning parser {name!r} names no marks.",
            "Give it start_token and end_token.",
            param="reasoning_parser",
        )
    own = next((word for word in ("extract_reasoning", "extract_reasoning_content") if _overrides(kind, word)), None)

    if own is None:
        return ReasoningMarks(begin, end, (begin, end))

    def split(text: str) -> tuple[str, str]:
        request = SimpleNamespace(tools=None, chat_template_kwargs=None)
        try:
            thought, said = getattr(kind(tokenizer), own)(text, request)
            return "".join((thought or "",)), "".join((said or "",))
        except Exception:
            logger.exception("%s failed on an answer, which is shown as it is.", kind.__name__)
            return "", text

    return ReasoningMarks(begin, end, (begin, end), whole=split)


def _overrides(kind: type, method: str) -> bool:
    """Whether a method is the operator's, and not one of our base classes'."""
    owner = next((each for each in kind.__mro__ if method in vars(each)), None)
    return owner is not None and not owner.__module__.startswith("beheld.")


class PluginReader:
    """Reads the calls of one answer, when it is whole.

    Args:
        kind: the class, which is made for each answer.
        tokenizer: the model's.
        schemas: the functions that may be called.
    """

    def __init__(self, kind: type, tokenizer: Any, schemas: Schemas) -> None:
        self._kind, self._tokenizer = kind, tokenizer
        self._tools = [
            SimpleNamespace(type="function", function=SimpleNamespace(name=name, description=None, parameters=schema))
            for name, schema in schemas.items()
        ]
        self._texts: list[str] = []

    def push(self, text: str) -> tuple[str, list[Piece]]:
        """Keep the text."""
        self._texts.append(text)
        return "", []

    def finish(self) -> tuple[str, list[Piece]]:
        """What the parser finds; an answer on which it fails is text."""
        text = "".join(self._texts)
        request = SimpleNamespace(tools=self._tools, tool_choice="auto", chat_template_kwargs=None)
        try:
            found = self._parser().extract_tool_calls(text, request)
            calls = [(call.function.name, call.function.arguments, call.id) for call in found.tool_calls]
            if not found.tools_called:
                return text if found.content is None else found.content, []
            return found.content or "", [Piece(name, arguments, one) for name, arguments, one in calls]
        except Exception:
            logger.exception("%s failed on an answer, which is shown as text.", self._kind.__name__)
            return text, []

    def _parser(self) -> Any:
        try:
            return self._kind(self._tokenizer, self._tools)
        except TypeError:
            # vLLM's older parsers take the tokenizer alone.
            return self._kind(self._tokenizer)
