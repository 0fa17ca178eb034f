"""Fields that have an effect in some engines only: in others they are noted, or refused."""

from __future__ import annotations

from collections.abc import Container
from typing import TypeVar

from pydantic import BaseModel

from beheld.api.async_llm import AsyncLLM
from beheld.server.answer_marks import AnswerMarks
from beheld.server.custom_tools import not_held
from beheld.server.errors import HttpError
from beheld.server.notes import Notes
from beheld.server.pooling_schema import Pooled
from beheld.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from beheld.server.template_options import EFFORT, THINKING, switches_effort, switches_thinking, unread_variables
from beheld.server.tools import free_inputs

B = TypeVar("B", bound=BaseModel)


def note(notes: Notes, param: str, words: str) -> None:
    """Note a field that has no effect.

    Raises:
        HttpError: such fields are refused.
    """
    if notes.strict:
        raise HttpError(400, words, "Leave it out.", param=param)
    notes.tell(param, words)


class FieldEffects:
    """Says which fields of a request have no effect in this engine.

    Each method raises HttpError where such fields are refused.

    Args:
        llm: the engine.
        forms: how the model writes tool calls and reasoning.
    """

    def __init__(self, llm: AsyncLLM, forms: AnswerMarks) -> None:
        self._llm = llm
        self._forms = forms

    def note_effort(self, body: ChatRequest | TokenizeRequest, notes: Notes, param: str = EFFORT) -> None:
        """Note that the template has no switch for the reasoning, or for its effort, if the request has one."""
        template = self._llm.chat_template
        if body.reasoning_effort is not None and not switches_effort(body, template):
            note(notes, param, "This model's template has no switch for it.")
        if isinstance(body, ChatRequest) and body.enable_thinking is not None and not switches_thinking(body, template):
            note(notes, THINKING, "This model's template has no switch for it.")

    def note_variables(self, body: ChatRequest | TokenizeRequest, notes: Notes, others: Container[str]) -> None:
        """Note the variables of the request that the template does not read; `others` are the operator's."""
        unread = [name for name in unread_variables(body, self._llm.chat_template) if name not in others]
        if unread:
            shown = ", ".join(repr(name[:64]) for name in unread[:8])
            note(notes, "chat_template_kwargs", f"This model's template does not read {shown}.")

    def note_grammars(self, body: ChatRequest, notes: Notes) -> None:
        """Note the custom tools whose calls may not follow their grammars."""
        for name in free_inputs(body, self._forms.calls):
            note(notes, "tools", f"{not_held(name)} The tool choices 'required' and this tool hold them to it.")

    def note_priority(self, body: ChatRequest | CompletionRequest | Pooled, notes: Notes) -> None:
        """Note that the engine does not rank requests, if this one has a priority."""
        if body.priority and self._llm.config.policy != "priority":
            words = "This engine takes requests in order. The operator may start it with --scheduling-policy priority."
            note(notes, "priority", words)

    def with_read_args(self, body: B, notes: Notes) -> B:
        """The body without arguments for a logits processor if nothing reads them, which is noted."""
        if not getattr(body, "vllm_xargs", None) or self._llm.reads_extra_args:
            return body
        note(notes, "vllm_xargs", "Nothing reads them here. The operator may load what does with --logits-processors.")
        # They may be large, and the answer may take long.
        return body.model_copy(update={"vllm_xargs": None})
