"""How the model writes tool calls and reasoning, and whether the server can end its reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from beheld.api.async_llm import AsyncLLM
from beheld.server.options import NONE, ServerOptions
from beheld.server.parser_plugins import add_format, marks_of
from beheld.server.tools import ToolForm, tool_form
from beheld.text.reasoning import FORMATS as REASONING
from beheld.text.reasoning import ReasoningMarks, format_of, reasoning_of
from beheld.text.tools import form_of


@dataclass(frozen=True)
class AnswerMarks:
    """How the model writes tool calls and reasoning; None if they are not read."""

    calls: ToolForm | None = None
    reasoning: ReasoningMarks | None = None


def answer_marks(llm: AsyncLLM, options: ServerOptions) -> AnswerMarks:
    """What the operator chose, or else what the model's family and its chat template say."""
    template, info = llm.chat_template, llm.info
    if options.reasoning_plugin is not None and options.reasoning_parser is not None:
        marks: ReasoningMarks | None = marks_of(options.reasoning_parser, options.reasoning_plugin, llm.tokenizer)
    else:
        marks = REASONING.get(options.reasoning_parser or reasoning_of(template, info.reasoning_formats) or NONE)
    if options.tool_plugin is not None and options.tool_parser is not None:
        # What marks its calls is not known here, and may be a special token.
        own = add_format(options.tool_parser, options.tool_plugin, llm.tokenizer)
        return AnswerMarks(ToolForm(own, special=True), marks)
    calls = options.tool_parser or form_of(template, info.call_formats)
    return AnswerMarks(tool_form(None if calls == NONE else calls, llm.tokenizer), marks)


def ends_reasoning(llm: AsyncLLM, marks: ReasoningMarks | None) -> bool:
    """True if the server can end reasoning after a budget: each of its marks is one token."""
    own = None if marks is None else format_of(marks)
    if own is None or llm.tokenizer is None:
        return False
    texts = (own.open, own.close)
    return all(len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) == 1 for text in texts)
