"""Errors as clients see them: OpenAI's format, with the field at fault and what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from beheld.core.errors import (
    AsleepError,
    BeheldError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    FetchError,
    LimitError,
    ModelError,
    PausedError,
    PromptTooLongError,
    UserError,
)
from beheld.core.plan import NAN
from beheld.server.field_names import NO_NAMES, FieldNames
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Name of the current request in X-Request-Id, and the beginning of its lines in the log.
REQUEST: ContextVar[str] = ContextVar("request", default="A request")
LOGGED: ContextVar[str] = ContextVar("logged", default="A request")

_NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
# Default code of an error, by status.
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "not_json",
    431: "headers_too_large",
    503: "unavailable",
}


# vLLM's types, which are the names of the errors that OpenAI's client raises.
_VLLM_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpError(Exception):
    """A response that is an error.

    Args:
        status: the HTTP status.
        reason: what is wrong, in one sentence.
        remedy: what the client can do.
        param: the field at fault, if there is one.
        code: a code that programs may test; the default depends on the status.
        headers: the response's headers.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        remedy: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.remedy = remedy
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The response's JSON, in the form of the route's API."""
        return DIALECT.get().error_body(self)

    def event(self) -> dict[str, Any]:
        """The error as an event of a stream, in the form of the route's API."""
        return DIALECT.get().error_event(self)

    def fields(self, kind: str) -> dict[str, Any]:
        """What every form of an error says; `kind` is its type."""
        return {
            "type": kind,
            "message": f"{self.reason} {self.remedy}",
            "param": self.param,
            "code": self.code or _CODES.get(self.status, "error"),
            "remedy": self.remedy,
        }

    def response(self) -> JSONResponse:
        """The response."""
        return JSONResponse(self.body(), self.status, self.headers)


class PausedHttpError(HttpError):
    """The response during a pause. On OpenAI's routes its type and code are vLLM's, whose trainers pause engines."""

    def fields(self, kind: str) -> dict[str, Any]:
        """As of any error."""
        if kind not in (_TYPES[self.status], _VLLM_TYPES[self.status]):
            return super().fields(kind)
        return super().fields(_VLLM_TYPES[self.status]) | {"code": self.status}


@dataclass(frozen=True)
class Dialect:
    """How an API writes its errors and its streams.

    Attributes:
        error_body: an error -> the JSON of its response.
        error_event: an error -> its event in a stream.
        named_events: an event of a stream has its type as a name.
        last_event: what a stream ends with.
    """

    error_body: Callable[[HttpError], dict[str, Any]]
    error_event: Callable[[HttpError], dict[str, Any]]
    named_events: bool
    last_event: bytes


def _openai_error(error: HttpError) -> dict[str, Any]:
    return {"error": error.fields(_TYPES.get(error.status, "server_error"))}


def _anthropic_error(error: HttpError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": error.fields(kind), "request_id": REQUEST.get()}


def _vllm_error(error: HttpError) -> dict[str, Any]:
    kind = _VLLM_TYPES.get(error.status, "BadRequestError" if error.status < 500 else "InternalServerError")
    return {"error": error.fields(kind)}


def _cohere_error(error: HttpError) -> dict[str, Any]:
    shown = error.fields("")
    return {"message": shown["message"], "id": REQUEST.get(), **{name: shown[name] for name in _COHERE_MORE}}


def _cohere_event(error: HttpError) -> dict[str, Any]:
    """Cohere's last event, which says what ended the stream."""
    return {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": _cohere_error(error)["message"]}}


# What Cohere's errors lack.
_COHERE_MORE = ("param", "code", "remedy")
OPENAI = Dialect(_openai_error, _openai_error, named_events=False, last_event=b"data: [DONE]\n\n")


def _response_error(error: HttpError) -> dict[str, Any]:
    """OpenAI's error event, with the error as its clients raise it."""
    shown = _openai_error(error)
    flat = {name: shown["error"][name] for name in ("code", "message", "param")}
    return {"type": "error", **flat, **shown}


RESPONSES = Dialect(_openai_error, _response_error, named_events=True, last_event=b"")
ANTHROPIC = Dialect(_anthropic_error, _anthropic_error, named_events=True, last_event=b"")
VLLM = Dialect(_vllm_error, _vllm_error, named_events=False, last_event=b"data: [DONE]\n\n")
COHERE = Dialect(_cohere_error, _cohere_event, named_events=True, last_event=b"data: [DONE]\n\n")
# The dialect of the current request.
DIALECT: ContextVar[Dialect] = ContextVar("dialect", default=OPENAI)
_DIALECTS = {"/v1/messages": ANTHROPIC, "/v1/responses": RESPONSES, "/v2/chat": COHERE, "/cohere/v2/chat": COHERE}
# Routes that vLLM made up, which only its clients ask.
_VLLM_ROUTES = (
    *("/pooling", "/classify", "/score", "/v1/score", "/tokenize", "/detokenize", "/adapters"),
    *("/generative_scoring", "/v1/systemone"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
_DIALECTS |= dict.fromkeys(_VLLM_ROUTES, VLLM)


def dialect_of(path: str) -> Dialect:
    """The dialect of a route and of those below it."""
    return next((d for root, d in _DIALECTS.items() if path == root or path.startswith(f"{root}/")), OPENAI)


def http_error(error: Exception, names: FieldNames = NO_NAMES) -> HttpError:
    """The response to an exception, with the client's field names (`names`); call it once per exception.

    For errors that are not the client's fault, the response has only the name under which the log shows them. A
    library's own message is always left out.
    """
    if isinstance(error, HttpError):
        error.param = names.placed(error.param)
        return error
    if isinstance(error, EngineDeadError):
        remedy = "Try again after the server's restart."
        return HttpError(503, error.reason, remedy, code="engine_dead", headers={"Retry-After": "10"})
    if isinstance(error, PausedError):
        remedy = "Send the request again once the operator has resumed it."
        return PausedHttpError(503, error.reason, remedy, headers={"Retry-After": "1"})
    if isinstance(error, AsleepError):
        remedy = "Try again after the operator has woken it up."
        return HttpError(503, error.reason, remedy, code="engine_asleep", headers={"Retry-After": "10"})
    if isinstance(error, UserError | CapacityError) and not isinstance(error, ModelError | ConfigError):
        where = f"{error.item}: " if error.item else ""
        return HttpError(
            _status(error),
            f"{where}{names.translated(error.reason, error)}",
            names.remedy(error),
            param=names.param(error),
            code=_code(error, error.stage),
        )
    name = LOGGED.get()
    if lacks_memory(error):
        # Without a traceback: writing it takes memory, too.
        logger.error("%s failed: the server has not enough memory for it.", name)
        reason = "The server has not enough memory for this request."
        remedy = "Send less in one request, or try again later."
        return HttpError(503, reason, remedy, code="no_memory", headers={"Retry-After": "1"})
    if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
        # As where the first request of a route imports what reads its body.
        logger.error("%s failed: the server has too many open files and connections.", name)
        reason = "The server has too many open files and connections."
        return HttpError(503, reason, "Try again later.", code="no_descriptors", headers={"Retry-After": "1"})
    where = f"The log has the reason under {REQUEST.get()}, for the operator."
    if isinstance(error, BeheldError):
        logger.error("%s failed: %s", name, error)
        reason = "The computation of this request failed; other requests continue."
        return HttpError(500, reason, where, code=_code(error, "step"))
    logger.error("%s failed with an internal error.", name, exc_info=error)
    return HttpError(500, "The server has an internal error.", where, code="internal")


def lacks_memory(error: BaseException) -> bool:
    """True if the system refused memory, also that of a new thread's stack."""
    no_thread = isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")
    return no_thread or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _code(error: BeheldError, stage: str) -> str:
    if isinstance(error, PromptTooLongError):
        # OpenAI's code: programs shorten a conversation when they see it.
        return "context_length_exceeded"
    return NAN if error.stage == NAN else f"{stage}_error"


def _status(error: BeheldError) -> int:
    if isinstance(error, FetchError):
        return 422 if error.stage == FetchError.stage else 400
    if isinstance(error, LimitError) and error.item is not None:
        return 413
    return 400
