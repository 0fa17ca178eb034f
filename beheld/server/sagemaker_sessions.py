"""Sessions of SageMaker, which sends the requests of one session to one instance, where their prefixes are cached."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from typing import Literal

from pydantic import Field
from starlette.responses import Response

from beheld.server.body_schema import Body
from beheld.server.errors import HttpError

# Names the session of a request.
SESSION = "X-Amzn-SageMaker-Session-Id"
_NEW, _CLOSED = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"
# How long a session lasts, and how many there are; a further one takes the place of the oldest.
_LASTS_S, _MOST = 1200.0, 4096


class SessionRequest(Body):
    """POST /invocations: the begin or the end of a session."""

    request_type: Literal["NEW_SESSION", "CLOSE"] = Field(alias="requestType")


class Sessions:
    """The sessions that have begun and not ended. An answer depends on none: they say where a request is sent."""

    def __init__(self) -> None:
        # Name -> when it ends, the oldest first.
        self._ends: OrderedDict[str, float] = OrderedDict()

    def answer(self, body: SessionRequest, name: str | None) -> Response:
        """Begin a session, or end the one of that name.

        Raises:
            HttpError: there is no name of a session to end, or no such session.
        """
        now = time.monotonic()
        while self._ends and next(iter(self._ends.values())) < now:
            self._ends.popitem(last=False)
        if body.request_type == "NEW_SESSION":
            if len(self._ends) >= _MOST:
                self._ends.popitem(last=False)
            made = secrets.token_hex(16)
            self._ends[made] = now + _LASTS_S
            until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _LASTS_S))
            return Response(headers={_NEW: f"{made}; Expires={until}"})
        if not name:
            raise HttpError(424, "There is no session to end: invalid session_id.", f"Send the header {SESSION}.")
        if self._ends.pop(name, None) is None:
            raise HttpError(400, "The session has ended or has never begun: session not found.", "Begin a new one.")
        return Response(headers={_CLOSED: name})
