"""Errors as clients see them: OpenAI's shape, with the field concerned and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.responses import JSONResponse

from beheld.core.errors import (
    BeheldError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    FetchError,
    LimitError,
    ModelError,
    PromptTooLongError,
    UserError,
)
from beheld.core.plan import NAN
from beheld.server.field_names import NO_NAMES, FieldNames
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# What the log and X-Request-Id call the request that is being answered.
REQUEST: ContextVar[str] = ContextVar("request", default="A request")

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
# The word of an error that has none of its own, by status.
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


class HttpError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        reason: what is wrong, one sentence.
        remedy: what somebody who can only send requests can do about it.
        param: the field concerned, if one can be named.
        code: a word that programs may test for; without one, the status has a word.
        headers: of the answer.
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
        """The JSON of it."""
        return {
            "error": {
                "message": f"{self.reason} {self.remedy}",
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code or _CODES.get(self.status, "error"),
                "remedy": self.remedy,
            }
        }

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def http_error(error: Exception, names: FieldNames = NO_NAMES) -> HttpError:
    """Any exception as an answer, in the client's words (`names`); to be asked once. Of what is not the client's fault
    nothing is told but the name that it is logged under, and of what a library said nothing at all.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, EngineDeadError):
        remedy = "Ask again when the server has started anew."
        return HttpError(503, error.reason, remedy, code="engine_dead", headers={"Retry-After": "10"})
    if isinstance(error, UserError | CapacityError) and not isinstance(error, ModelError | ConfigError):
        where = f"{error.item}: " if error.item else ""
        return HttpError(
            _status(error),
            f"{where}{names.said(error.reason, error)}",
            names.remedy(error),
            param=names.param(error),
            code=_code(error, error.stage),
        )
    name = REQUEST.get()
    where = f"The operator finds the reason in the log, under {name}."
    if isinstance(error, BeheldError):
        logger.error("%s failed: %s", name, error)
        reason = "This request failed while it was computed; others went on."
        return HttpError(500, reason, where, code=_code(error, "step"))
    logger.error("%s failed for a reason of our own.", name, exc_info=error)
    return HttpError(500, "The server made a mistake.", where, code="internal")


def _code(error: BeheldError, stage: str) -> str:
    if isinstance(error, PromptTooLongError):
        # OpenAI's word: programs shorten a conversation when they see it.
        return "context_length_exceeded"
    return NAN if error.stage == NAN else f"{stage}_error"


def _status(error: BeheldError) -> int:
    if isinstance(error, FetchError):
        return 422 if error.stage == FetchError.stage else 400
    if isinstance(error, LimitError) and error.item is not None:
        return 413
    return 400
