"""Schemas of the responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

# Routes whose response may be a stream of server-sent events, each a chunk of the same kind or a named event.
STREAMED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/invocations"),
        *("/v2/chat", "/cohere/v2/chat"),
    }
)

_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_NUMBER: dict[str, Any] = {"type": "number"}
_ANY: dict[str, Any] = {"type": "object"}


def _object(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """An object with these properties, all required except the optional ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_REASON = _maybe({"enum": ["stop", "length", "tool_calls", "abort", "repetition"]})
_CALL = _object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})})
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _maybe(_TEXT),
        "reasoning_content": _TEXT,
        "tool_calls": _list(_CALL),
    },
    "reasoning_content",
    "tool_calls",
)
_ENTRY = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_RAW = _object({"type": {"const": "raw_message_tokens"}, "message": _TEXT, "tokens": _list(_COUNT)})
_STOP_REASON = _maybe({"type": ["integer", "string"]})
_CHAT_CHOICE = _object(
    {
        "index": _COUNT,
        "message": _MESSAGE,
        "logprobs": _maybe(_object({"content": _list(_object({**_ENTRY, "top_logprobs": _list(_object(_ENTRY))}))})),
        "finish_reason": _REASON,
        "stop_reason": _STOP_REASON,
        "grounding": _list(_named("Place")),
        "token_ids": _maybe(_list(_COUNT)),
    },
    "grounding",
)
_CHOICE = _object(
    {
        "index": _COUNT,
        "text": _TEXT,
        "logprobs": _maybe(_ANY),
        "finish_reason": _REASON,
        "stop_reason": _STOP_REASON,
        "prompt_logprobs": _maybe(_list(_maybe(_ANY))),
        "prompt_token_ids": _maybe(_list(_COUNT)),
        "token_ids": _maybe(_list(_COUNT)),
    }
)
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    },
    "completion_tokens_details",
)
_RECEIPT = _object(
    {
        "item": _TEXT,
        "modality": {"enum": ["image", "video", "audio"]},
        "index": _COUNT,
        "given": _ANY,
        "used": _ANY,
        "lost": _list(_TEXT),
        "tokens": _COUNT,
        "cached": {"type": "boolean"},
        "milliseconds": {"type": "object", "additionalProperties": _NUMBER},
        "digest": _TEXT,
    }
)
_NUMBERS = _list(_NUMBER)
_PLACE = _object(
    {
        "label": _TEXT,
        "image": _TEXT,
        "box": _NUMBERS,
        "points": _list(_NUMBERS),
        "step": _NUMBERS,
        "upright_box": _NUMBERS,
        "upright_points": _list(_NUMBERS),
    },
    *("box", "points", "upright_box", "upright_points"),
)
_WARNING = _object({"param": _TEXT, "message": _TEXT})
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT}

RESPONSES: dict[str, Any] = {
    "Usage": _USAGE,
    "Receipt": _RECEIPT,
    "Place": _PLACE,
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(_CHAT_CHOICE),
            "usage": _named("Usage"),
            "media": _list(_named("Receipt")),
            "metrics": {"type": "object", "additionalProperties": _NUMBER},
            "prompt_logprobs": _maybe(_list(_maybe(_ANY))),
            "prompt_text": _TEXT,
            "prompt_token_ids": _maybe(_list(_COUNT)),
            "warnings": _list(_WARNING),
        },
        "warnings",
        "media",
        "metrics",
        "prompt_text",
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(_CHOICE),
            "usage": _named("Usage"),
            "warnings": _list(_WARNING),
        },
        "warnings",
    ),
    "Generated": _object(
        {
            "request_id": _TEXT,
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "token_ids": _list(_COUNT),
                        "logprobs": _maybe(_object({"content": _list(_ANY)})),
                        "finish_reason": _REASON,
                        "stop_reason": _STOP_REASON,
                        "text": _TEXT,
                    },
                    "text",
                )
            ),
            "output_mode": _TEXT,
            "usage": _named("Usage"),
            "prompt_logprobs": _list(_maybe(_ANY)),
            "prompt_token_id_logprobs": _TEXT,
            "prompt_token_ids": _list(_COUNT),
            "warnings": _list(_WARNING),
        },
        *("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "warnings", "output_mode"),
    ),
    "Decided": _object(
        {
            **_HEAD,
            "object": {"const": "structured_decision"},
            "answers": {"type": "object", "additionalProperties": _ANY},
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
            "diagnostics": {
                "type": "object",
                "additionalProperties": _object({"label_mass": _NUMBER, "argmax_is_label": {"type": "boolean"}}),
            },
            "joint": {"type": "null"},
            "media": _list(_named("Receipt")),
            "warnings": _list(_WARNING),
        },
        *("media", "warnings"),
    ),
    "Decisions": _object(
        {
            "model": _TEXT,
            "answers": _list(_ANY),
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
            "media": _list(_named("Receipt")),
            "warnings": _list(_WARNING),
        },
        *("media", "warnings"),
    ),
    "Pooled": _object(
        {**_HEAD, "object": {"const": "list"}, "data": _list(_object({"index": _COUNT})), "usage": _named("Usage")}
    ),
    "Embedded": _object(
        {
            "id": _TEXT,
            "model": _TEXT,
            "response_type": {"const": "embeddings_by_type"},
            "embeddings": _ANY,
            "texts": _list(_TEXT),
            "usage": _named("Usage"),
            "meta": _ANY,
        },
        "texts",
    ),
    "Ranked": _object(
        {
            "id": _TEXT,
            "model": _TEXT,
            "results": _list(_object({"index": _COUNT, "relevance_score": _NUMBER, "document": _ANY}, "document")),
            "usage": _named("Usage"),
            "meta": _ANY,
        }
    ),
    "Invoked": {"anyOf": [_named(name) for name in ("ChatCompletion", "Completion", "Pooled", "Embedded", "Ranked")]},
    "MessageAnswer": _object(
        {
            "id": _TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _TEXT,
            "content": _list(_ANY),
            "stop_reason": {
                "enum": [
                    *("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"),
                    "model_context_window_exceeded",
                ]
            },
            "stop_sequence": _maybe(_TEXT),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
            "media": _list(_named("Receipt")),
            "warnings": _list(_WARNING),
            "grounding": _list(_named("Place")),
        },
        "media",
        "warnings",
        "grounding",
    ),
    "CohereAnswer": _object(
        {
            "id": _TEXT,
            "finish_reason": {"enum": ["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]},
            "message": _object(
                {"role": {"const": "assistant"}, "content": _list(_ANY), "tool_calls": _list(_CALL)}, "tool_calls"
            ),
            "usage": _object({"billed_units": _ANY, "tokens": _ANY, "cached_tokens": _COUNT}),
            "logprobs": _list(_object({"text": _TEXT, "token_ids": _list(_COUNT), "logprobs": _NUMBERS})),
            "media": _list(_named("Receipt")),
            "warnings": _list(_WARNING),
        },
        *("logprobs", "media", "warnings"),
    ),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "grounding": _list(_named("Place")),
            "input_messages": _list(_RAW),
            "output_messages": _list(_RAW),
        },
        *("grounding", "input_messages", "output_messages"),
    ),
    "InputTokens": _object({"input_tokens": _COUNT}),
    "Rendered": _object(
        {
            "request_id": _TEXT,
            "token_ids": _list(_COUNT),
            "sampling_params": _ANY,
            "model": _TEXT,
            "stream": {"const": True},
            "cache_salt": _TEXT,
            "priority": {"type": "integer"},
        },
        *("stream", "cache_salt", "priority"),
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT), "token_strs": _maybe(_list(_TEXT))}
    ),
    "Prompt": _object({"prompt": _TEXT}),
    "Transcript": _object(
        {"text": _TEXT, "usage": _ANY, "task": _TEXT, "language": _TEXT, "duration": _NUMBER, "segments": _list(_ANY)},
        "task",
        "language",
        "duration",
        "segments",
    ),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "parent": _maybe(_TEXT),
            "max_model_len": _COUNT,
            "modalities": _list({"enum": ["image", "video", "audio"]}),
            "advice": _object({"answer": _TEXT, "text": _TEXT}),
        },
        "advice",
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_named("Model"))}),
    "Health": _object({"status": {"const": "ok"}}),
    "Version": _object({"version": _TEXT}),
    "Load": _object({"server_load": {"type": "integer"}}),
    "Document": _object({"openapi": _TEXT, "paths": _ANY}),
}

# Route -> schema of its response.
SHOWN = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "Completion",
    "/inference/v1/generate": "Generated",
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score"), "Pooled"),
    "/generative_scoring": "Pooled",
    "/v1/systemone": "Decided",
    "/v1/decisions": "Decisions",
    "/v2/embed": "Embedded",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "Ranked"),
    "/invocations": "Invoked",
    "/v1/messages": "MessageAnswer",
    "/v1/messages/count_tokens": "InputTokens",
    **dict.fromkeys(("/v2/chat", "/cohere/v2/chat"), "CohereAnswer"),
    "/cohere/v2/chat/render": "Rendered",
    "/v1/responses": "Response",
    "/v1/responses/{name}": "Response",
    "/v1/responses/{name}/cancel": "Response",
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "Transcript"),
    "/tokenize": "Tokens",
    "/detokenize": "Prompt",
    "/v1/models": "Models",
    "/v1/models/{name}": "Model",
    "/health": "Health",
    "/ping": "Health",
    "/version": "Version",
    "/load": "Load",
    "/openapi.json": "Document",
}
