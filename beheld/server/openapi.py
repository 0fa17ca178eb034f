"""The OpenAPI document, made from the request schema."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic.json_schema import models_json_schema

from beheld import __version__
from beheld.server.cohere_schema import CohereChatRequest
from beheld.server.decisions_schema import DecisionsRequest, SystemOneRequest
from beheld.server.embed_schema import EmbedRequest
from beheld.server.generate_schema import AbortRequest, GenerateRequest, GenerativeScoringRequest
from beheld.server.messages_schema import CountRequest, MessagesRequest
from beheld.server.pooling_routes import POOLING_ROUTES
from beheld.server.pooling_schema import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from beheld.server.responses import RESPONSES, SHOWN, STREAMED
from beheld.server.responses_schema import ResponsesRequest
from beheld.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from beheld.server.speech_schema import TranscriptionLink, TranscriptionRequest, TranslationLink, TranslationRequest


class Invocation(
    RootModel[
        ChatRequest
        | CompletionRequest
        | EmbeddingRequest
        | EmbedRequest
        | PoolingRequest
        | ClassifyRequest
        | ScoreRequest
        | RerankRequest
    ]
):
    """POST /invocations: the body of any of these routes."""


_POOLED = {
    "EmbeddingRequest": "The vectors of texts or of a conversation, with a model that pools.",
    "EmbedRequest": "The vectors of texts or images in Cohere's form, with a model that pools.",
    "PoolingRequest": "What a model that pools makes of texts or of a conversation.",
    "ClassifyRequest": "The classes of texts or of a conversation, with a model that has some.",
    "ScoreRequest": "How well the sides of pairs go together, with a model that pools.",
    "RerankRequest": "Documents in the order of how well they fit a query, with a model that pools.",
}
_COHERE = ("/v2/chat", "/cohere/v2/chat")
_COHERE_ERRORS = (*_COHERE, "/cohere/v2/chat/render")
_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a conversation.", ChatRequest),
    "/v1/completions": ("Continue a prompt.", CompletionRequest),
    "/inference/v1/generate": ("Continue token ids by token ids.", GenerateRequest),
    "/generative_scoring": ("How likely some tokens are after a query and each item.", GenerativeScoringRequest),
    "/v1/systemone": ("How likely each of given answers to questions is.", SystemOneRequest),
    "/v1/decisions": ("The same, in the form of OpenAI's Decisions.", DecisionsRequest),
    **{path: (_POOLED[kind.__name__], kind) for path, kind in POOLING_ROUTES},
    "/invocations": ("Answer the body of any of these routes, for SageMaker.", Invocation),
    "/v1/messages": ("Answer a conversation, in Anthropic's form.", MessagesRequest),
    "/v1/messages/count_tokens": ("Count the tokens of such a conversation.", CountRequest),
    **dict.fromkeys(_COHERE, ("Answer a conversation, in Cohere's form.", CohereChatRequest)),
    "/cohere/v2/chat/render": ("What /inference/v1/generate answers in its place.", CohereChatRequest),
    "/v1/responses": ("Answer a conversation, in the form of OpenAI's Responses.", ResponsesRequest),
    "/v1/audio/transcriptions": ("The words of an audio.", TranscriptionRequest),
    "/v1/audio/translations": ("The words of an audio in English.", TranslationRequest),
    "/tokenize": ("The token ids of a prompt or of a conversation.", TokenizeRequest),
    "/detokenize": ("The text of token ids.", DetokenizeRequest),
    "/inference/v1/abort_requests": ("End answers by their ids.", AbortRequest),
}
# Operations without a body, besides GET.
_OTHERS = {
    ("/ping", "post"): "Check that the engine answers.",
    ("/v1/responses/{name}", "delete"): "Forget a stored response.",
    ("/v1/responses/{name}/cancel", "post"): "End a response.",
}
# Routes whose body is a form, and what it is as JSON.
_FORMS = {"/v1/audio/transcriptions": TranscriptionLink, "/v1/audio/translations": TranslationLink}
_GETS = {
    "/v1/responses/{name}": "A stored response.",
    "/v1/streams/{name}": "The events after Last-Event-ID of a stream that was cut.",
    "/v1/models": "The models of this server.",
    "/v1/models/{name}": "One model.",
    "/health": "Check that the engine answers.",
    "/ping": "The same.",
    "/version": "The version of the server.",
    "/metrics": "Counters for Prometheus.",
    "/load": "How many answers are in work.",
    "/openapi.json": "This document.",
}
_REFUSALS = ("400", "401", "404", "405", "408", "410", "413", "415", "422", "431", "500", "503")


@cache
def document() -> dict[str, Any]:
    """The document as plain JSON types."""
    models = [(kind, "validation") for kind in (*(kind for _, kind in _POSTS.values()), *_FORMS.values())]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _operation(path, words, {"$ref": f"#/components/schemas/{kind.__name__}"})}
        for path, (words, kind) in _POSTS.items()
    }
    paths |= {path: {"get": _operation(path, words, None)} for path, words in _GETS.items()}
    for (path, method), words in _OTHERS.items():
        paths.setdefault(path, {})[method] = _operation(path, words, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "beheld", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), **RESPONSES, "Error": _ERROR, "CohereError": _COHERE_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
                "remedy": {"type": ["string", "null"]},
            },
        }
    },
}


_COHERE_ERROR = {
    "type": "object",
    "required": ["message", "id"],
    "properties": {
        "message": {"type": "string"},
        "id": {"type": ["string", "null"]},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
        "remedy": {"type": ["string", "null"]},
    },
}


# One event of a stream.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}


def _operation(path: str, words: str, body: dict[str, Any] | None) -> dict[str, Any]:
    error = "CohereError" if path in _COHERE_ERRORS else "Error"
    refusal = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": _content(path)}}
    responses |= {status: {"description": "Refused.", "content": refusal} for status in _REFUSALS}
    made: dict[str, Any] = {"summary": words, "responses": responses}
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if body is not None:
        content = {"application/json": {"schema": body}}
        if path in _FORMS:
            link = {"$ref": f"#/components/schemas/{_FORMS[path].__name__}"}
            content = {"multipart/form-data": {"schema": body}, "application/json": {"schema": link}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    if path == "/v1/streams/{name}":
        return {"text/event-stream": {"schema": _EVENT}}
    if path not in SHOWN:
        return {}
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": f"#/components/schemas/{SHOWN[path]}"}}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    if path in _FORMS:
        content |= {"text/plain": {"schema": {"type": "string"}}, "text/vtt": {"schema": {"type": "string"}}}
    return content
