"""What the engine is asked for a chat request: messages, sampling parameters and variables of the template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from beheld.api.async_llm import AsyncLLM
from beheld.core.beams import BeamSearchParams
from beheld.core.params import SamplingParams
from beheld.server.answer_marks import AnswerMarks
from beheld.server.chat_messages import read_as, turned
from beheld.server.errors import HttpError
from beheld.server.options import ServerOptions
from beheld.server.sampling import beams_of, check_named, check_one_length, sampling
from beheld.server.schema import ChatRequest, TokenizeRequest
from beheld.server.template_options import template_of, variables_of
from beheld.server.tools import ToolUse, allowed_only, shown_tools, tool_use
from beheld.text.reasoning import NONEMPTY
from beheld.utils.part_fields import PartFields

# Fields that are of no use once the order is made.
_OF_ORDERS = (
    *("documents", "tools", "chat_template", "mm_processor_kwargs", "media_io_kwargs"),
    *("structured_outputs", "response_format", "allowed_token_ids", "logit_bias", "vllm_xargs"),
)


@dataclass(frozen=True)
class ChatOrder:
    """What the engine is asked for a chat request.

    Attributes:
        messages: the conversation as the input pipeline takes it. Its media may be large.
        shown: further fields of the conversation.
        params: how the answer is sampled.
        beams: the search in place of that, if there is one.
        tools: how it uses tools.
        begun: the text that the answer begins with.
        tells_times: whether the answer gives its times.
    """

    messages: list[dict[str, Any]]
    shown: dict[str, Any]
    params: SamplingParams
    beams: BeamSearchParams | None
    tools: ToolUse
    begun: str
    tells_times: bool


def order_of(llm: AsyncLLM, body: ChatRequest, options: ServerOptions, forms: AnswerMarks) -> ChatOrder:
    """What the engine is asked for a request, whose messages are taken out. It may take long, and runs in any thread.

    Args:
        llm: the engine.
        body: the request.
        options: the server's options.
        forms: how the model writes tool calls and reasoning.

    Raises:
        HttpError, ParamsError: fields contradict each other, or one is out of range.
    """
    form, marks = forms.calls, forms.reasoning
    tools = tool_use(body, form, options.max_tools)
    shows_marks = form is not None and form.special and tools.form == form.name
    _check(body, tools, shows_marks=shows_marks)
    longest = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    defaults = llm.get_default_sampling_params()
    if defaults.max_tokens == SamplingParams.max_tokens:
        # The checkpoint recommends no length: an answer goes on until the model ends it.
        defaults.max_tokens = None
    beams = beams_of(body, options, llm.config.max_model_len if longest is None else longest, tools.grammar)
    params = sampling(
        body,
        defaults,
        options,
        max_tokens=longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs and not body.logprob_token_ids else None,
        structured_outputs=tools.grammar,
        skip_special_tokens=False
        if shows_marks or (marks is not None and marks.channels is not None)
        else body.skip_special_tokens,
    )
    # Before anything looks at the client's template, which may not be accepted.
    shown = template_of(body, options) | {"template_kwargs": variables_of(body, llm.chat_template)}
    messages = turned(body.messages, options, PartFields(body.chat_template, llm.chat_template))
    read_as(messages, body.media_io_kwargs, options)
    begun = _last_words(messages[-1]) if body.echo else ""
    # Of several answers none has times of its own, and a search has those of its last step.
    tells_times = options.tells_times and (body.n or 1) == 1 and beams is None
    return ChatOrder(messages, shown | {"tools": tools.shown}, params, beams, tools, begun, tells_times)


def without_inputs(body: ChatRequest) -> ChatRequest:
    """The request without what its order has, which may be large, and which nothing reads while it is answered."""
    kept = {NONEMPTY: True} if is_nonempty(body) else None
    return body.model_copy(update={**dict.fromkeys(_OF_ORDERS), "chat_template_kwargs": kept})


def is_nonempty(body: ChatRequest) -> bool:
    """Whether the request's reasoning must not be empty."""
    return (body.chat_template_kwargs or {}).get(NONEMPTY) is True


def _last_words(message: dict[str, Any]) -> str:
    """The text of the last message if it is the assistant's, with which an answer begins that echoes it."""
    if message["role"] != "assistant":
        return ""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _check(body: ChatRequest, tools: ToolUse, *, shows_marks: bool) -> None:
    """Raise HttpError if fields contradict each other."""
    if shows_marks and body.skip_special_tokens:
        raise HttpError(
            400,
            "This model's tool calls begin with a special token, which must not be skipped.",
            "Leave skip_special_tokens out.",
            param="skip_special_tokens",
        )
    formed = body.response_format is not None and body.response_format.type != "text"
    # A call that must be made leaves no content that a response_format could shape.
    strict = tools.grammar is not None and tools.grammar.calls is not None
    if tools.grammar is not None and (body.structured_outputs is not None or (formed and strict)):
        raise HttpError(
            400,
            "tool_choice and a grammar cannot be combined.",
            "Set tool_choice to 'auto' or 'none', or leave the grammar out.",
            param="tool_choice",
        )
    check_named(body, reports=body.logprobs is True, remedy="Set logprobs to true.")
    if body.logprobs is not True and body.top_logprobs is not None:
        raise HttpError(400, "top_logprobs needs logprobs.", "Set logprobs to true.", param="top_logprobs")
    check_one_length(body)


def tokenize_options(body: TokenizeRequest | ChatRequest, options: ServerOptions, own: str | None) -> dict[str, Any]:
    """The arguments of AsyncLLM.chat_token_ids for a conversation to tokenize; `own` is the model's template.

    Raises:
        HttpError: fields contradict each other.
    """
    if isinstance(body, ChatRequest):
        body = allowed_only(body)
    shows_tools = body.tools and not (isinstance(body, ChatRequest) and body.tool_choice == "none")
    # Before anything looks at the client's template, which may not be accepted.
    chosen = template_of(body, options)
    messages = turned(body.messages or [], options, PartFields(body.chat_template, own))
    read_as(messages, body.media_io_kwargs, options)
    return chosen | {
        "messages": messages,
        "tools": shown_tools(body.tools or (), options.max_tools) if shows_tools else None,
        "template_kwargs": variables_of(body, own),
    }
