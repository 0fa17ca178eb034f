"""POST /cohere/v2/chat/render: a conversation's tokens and its parameters, as /inference/v1/generate takes them."""

from __future__ import annotations

from typing import Any

from beheld.core.params import SamplingParams
from beheld.server.chat import ChunkHead
from beheld.server.chat_order import ChatOrder
from beheld.server.errors import HttpError
from beheld.server.generate_schema import GenerateParams
from beheld.server.parts_schema import TextPart
from beheld.server.schema import ChatRequest
from beheld.text.reasoning import ReasoningMarks

# The tokens that are answered have no media, and no form of reasoning or of calls.
_ASK = "Send the request to /v2/chat."


def check_media(body: ChatRequest) -> None:
    """Raise HttpError if messages have media, which tokens alone cannot stand for."""
    for number, message in enumerate(body.messages):
        parts = message.content if isinstance(message.content, list) else ()
        for place, part in enumerate(parts):
            if not isinstance(part, TextPart):
                where = f"messages.{number}.content.{place}"
                raise HttpError(400, "Tokens alone cannot stand for an image.", _ASK, param=where)


def check(body: ChatRequest, order: ChatOrder, marks: ReasoningMarks | None) -> None:
    """Raise HttpError if /inference/v1/generate would answer otherwise than /v2/chat.

    Args:
        body: the request.
        order: what the engine would be asked.
        marks: how the model delimits its reasoning, if it reasons.
    """
    if order.tools.grammar is not None:
        named = "strict_tools" if body.tool_choice is None else "tool_choice"
        raise HttpError(400, "The form that calls must have is not rendered.", _ASK, param=named)
    if marks is not None and order.params.structured_outputs is not None:
        reason = "This model reasons before its answer, and the rendered tokens do not say where the format begins."
        raise HttpError(400, reason, _ASK, param="response_format")
    if order.params.thinking_token_budget is not None:
        reason = "The rendered tokens do not say where reasoning ends."
        raise HttpError(400, reason, f"Leave the budget out, or {_ASK[0].lower()}{_ASK[1:]}", param="thinking")


def rendered(body: ChatRequest, order: ChatOrder, head: ChunkHead, ids: list[int]) -> dict[str, Any]:
    """The body of a request to /inference/v1/generate, with the tokens `ids`."""
    more = {name: value for name in ("cache_salt", "priority") if (value := getattr(body, name)) is not None}
    streams = {"stream": True} if body.stream else {}
    params = _params(order.params)
    return {"request_id": head.id, "token_ids": ids, "sampling_params": params, "model": head.model, **streams, **more}


def _params(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are stated, as JSON."""
    given = {name: getattr(params, name) for name in GenerateParams.model_fields}
    # `output_mode` says whether there is a text.
    made = {name: value for name, value in given.items() if value is not None and name != "detokenize"}
    if params.structured_outputs is not None:
        stated = vars(params.structured_outputs).items()
        made["structured_outputs"] = {name: value for name, value in stated if value is not None}
    if params.repetition_detection is not None:
        made["repetition_detection"] = vars(params.repetition_detection)
    return made
