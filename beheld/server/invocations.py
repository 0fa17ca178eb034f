"""POST /invocations: SageMaker's one route, whose body says which of the others answers it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from beheld.core.pooling import PoolerInfo
from beheld.server.embed_schema import EmbedRequest
from beheld.server.errors import HttpError
from beheld.server.pooling_schema import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from beheld.server.sagemaker_sessions import SessionRequest
from beheld.server.schema import ChatRequest, CompletionRequest

# Names the adapter in place of `model`.
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
_SIDES = frozenset(ScoreRequest.model_fields) & {
    *("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
}


def kind_of(given: Any, info: PoolerInfo | None) -> type[BaseModel]:
    """Return which body an object is, for a model that pools in this way, or generates.

    Raises:
        HttpError: it has the fields of none.
    """
    names = set(given) if isinstance(given, dict) else set()
    if "requestType" in names:
        return SessionRequest
    if info is None:
        if "messages" in names:
            return ChatRequest
        if "prompt" in names or "prompt_embeds" in names:
            return CompletionRequest
        raise _unknown("messages or a prompt")
    if "query" in names:
        return RerankRequest
    if names & _SIDES:
        return ScoreRequest
    if names & {"texts", "images", "inputs"}:
        return EmbedRequest
    if "task" in names or not names & {"input", "messages"}:
        if "task" not in names:
            raise _unknown("input or messages, both sides of pairs, or a query and documents")
        return PoolingRequest
    return {"embed": EmbeddingRequest, "classify": ClassifyRequest}.get(info.usual, PoolingRequest)


def _unknown(fields: str) -> HttpError:
    return HttpError(400, "The body is that of no route of this model.", f"Send one with {fields}.")
