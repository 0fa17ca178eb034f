"""A response of JSON that is written while its client reads it."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from beheld.server.errors import http_error
from beheld.server.field_names import FieldNames
from beheld.server.json_pieces import LongJson
from beheld.server.stream import Finished, Gone, until_gone
from beheld.utils.loop_share import LoopShare


class LongResponse(Response):
    """JSON that is made piece by piece, as fast as the client reads; pieces of all such responses take turns.

    Args:
        body: the JSON.
        turns: when a piece may be made.
        finished: called once at the end, with the error if there is one; Gone if the client disconnected.
        names: the client's field names, for errors.
    """

    media_type = "application/json"

    def __init__(self, body: LongJson, turns: LoopShare, finished: Finished, names: FieldNames) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._body = body
        self._turns = turns
        self._finished = finished
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces; a client that disconnects ends it, and after an error the connection is cut."""
        try:
            await until_gone(self._send(send), receive)
        except (Gone, OSError) as error:
            self._finished(error)
        except Exception as error:
            self._finished(http_error(error, self._names))
            raise
        except BaseException:
            self._finished(Gone())
            raise
        else:
            self._finished(None)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = self._body.pieces()
        while True:
            await self._turns.turn()
            piece = next(pieces, None)
            await send({"type": "http.response.body", "body": piece or b"", "more_body": piece is not None})
            if piece is None:
                return
