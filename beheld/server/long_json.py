"""JSON that is written while its client reads it: lists too long to be held as text, and the response with them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from beheld.server.errors import http_error
from beheld.server.field_names import FieldNames
from beheld.server.stream import Finished, Gone, until_gone
from beheld.utils.loop_share import LoopShare

# Characters and elements that are made in one turn, which takes some two milliseconds.
_PIECE, _ELEMENTS = 16 << 10, 256
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class LongList:
    """A list of JSON values that exist only while they are written.

    Args:
        parts: each makes elements anew whenever it is called; together they are the list.
    """

    def __init__(self, *parts: Callable[[], Iterable[Any]]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part()


class LongJson:
    """A JSON value that may hold long lists.

    Attributes:
        lists: these lists, in order.

    Raises:
        ValueError: a number is not finite.
    """

    def __init__(self, value: Any) -> None:
        self.lists: list[LongList] = []
        # Takes the place of each list; no client can send this text.
        mark = uuid.uuid4().hex

        def set_aside(found: Any) -> str:
            if not isinstance(found, LongList):
                raise TypeError(f"{type(found).__name__} is not JSON")
            self.lists.append(found)
            return mark

        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=set_aside)
        self._around = encoder.encode(value).split(f'"{mark}"')

    def pieces(self) -> Iterator[bytes]:
        """The text in UTF-8, in pieces of at most some 16 KiB; what is between the lists is not divided."""
        texts: list[str] = []
        size = 0
        for text in self._texts():
            texts.append(text)
            size += len(text)
            if size >= _PIECE or len(texts) >= _ELEMENTS:
                yield "".join(texts).encode()
                texts.clear()
                size = 0
        yield "".join(texts).encode()

    def _texts(self) -> Iterator[str]:
        before, *others = self._around
        yield before
        for values, after in zip(self.lists, others, strict=True):
            comma = "["
            for value in values:
                yield comma + _encoded(value)
                comma = ","
            yield "[]" if comma == "[" else "]"
            yield after


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
