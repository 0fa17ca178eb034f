"""The options of the chat template and of the processor that a request sets, and whether its client is trusted to."""

from __future__ import annotations

from typing import Any

from beheld.core.media import AUDIO_IN_VIDEO
from beheld.core.request import ForeignTemplate
from beheld.server import limits
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.schema import ChatRequest, TokenizeRequest
from beheld.text.reasoning import NONEMPTY

# The template variable of models whose reasoning can be made longer or shorter.
EFFORT = "reasoning_effort"
THINKING = "enable_thinking"
# That of models that answer by given texts.
DOCUMENTS = "documents"


def template_of(body: Any, options: ServerOptions, *, adds: bool = True) -> dict[str, Any]:
    """The options of the template and the processor that the client is trusted to set.

    Args:
        body: a request with messages.
        options: the server's options.
        adds: whether the template starts an answer unless the request says otherwise.
    """
    if body.chat_template is not None and not options.trust_templates:
        raise HttpError(
            400,
            "This server does not accept templates in requests.",
            "The operator may start it with --trust-request-chat-template.",
            param="chat_template",
        )
    if body.chat_template == "":
        raise HttpError(400, "The chat_template is empty.", "Leave it out for the model's own.", param="chat_template")
    if len(body.chat_template or "") > limits.MAX_TEMPLATE_LETTERS:
        words = f"The chat_template has more than {limits.MAX_TEMPLATE_LETTERS} letters."
        raise HttpError(400, words, "Send a shorter one.", param="chat_template")
    check_processor_options(body.mm_processor_kwargs, options)
    going_on = body.continue_final_message is True
    add = body.add_generation_prompt if body.add_generation_prompt is not None else adds and not going_on
    return {
        "chat_template": None if body.chat_template is None else ForeignTemplate(body.chat_template),
        "template_kwargs": body.chat_template_kwargs,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "add_generation_prompt": add,
        "continue_final_message": going_on,
        "add_special_tokens": body.add_special_tokens is True,
    }


def switches_effort(body: ChatRequest | TokenizeRequest, own: str | None) -> bool:
    """True if the request's template, or else the model's own, has a variable for the reasoning's effort."""
    return EFFORT in _template_text(body, own)


def switches_thinking(body: ChatRequest, own: str | None) -> bool:
    """True if the request's template, or else the model's own, has a variable that switches reasoning off."""
    return THINKING in _template_text(body, own)


def unread_variables(body: ChatRequest | TokenizeRequest, own: str | None) -> list[str]:
    """The names of the request's variables that its template, or else the model's own, does not have.

    None are if there is no such template: then a template of the family's, or a writer of its own, makes the prompt.
    """
    text = _template_text(body, own)
    return [name for name in body.chat_template_kwargs or {} if name not in text and name != NONEMPTY] if text else []


def _template_text(body: ChatRequest | TokenizeRequest, own: str | None) -> str:
    return body.chat_template or own or ""


def variables_of(body: ChatRequest | TokenizeRequest, own: str | None) -> dict[str, Any] | None:
    """The variables of the template; `own` is the model's.

    Raises:
        HttpError: the template has no place for documents.
    """
    made: dict[str, Any] = {}
    if body.reasoning_effort is not None and switches_effort(body, own):
        made[EFFORT] = body.reasoning_effort
    thinks = body.enable_thinking if isinstance(body, ChatRequest) else None
    if thinks is not None and THINKING in _template_text(body, own):
        made[THINKING] = thinks
    documents = body.documents if isinstance(body, ChatRequest) else None
    if documents:
        if DOCUMENTS not in _template_text(body, own):
            raise HttpError(
                400,
                "This model's chat template has no place for documents.",
                "Write them in a message.",
                param=DOCUMENTS,
            )
        made[DOCUMENTS] = documents
    return {**made, **(body.chat_template_kwargs or {})} or None


def check_processor_options(given: dict[str, Any] | None, options: ServerOptions) -> None:
    """Raise HttpError if an untrusted client sent processor options."""
    if given and not given.keys() <= set(AUDIO_IN_VIDEO) and not options.trust_processor_options:
        raise HttpError(
            400,
            "This server does not accept processor options in requests.",
            "The operator may start it with --trust-request-mm-kwargs.",
            param="mm_processor_kwargs",
        )
