"""Asks another front of the server over its socket: the answer is read while the request's body is still sent.

A front may refuse a request before its body is there, and a client may never send the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import h11

_PIECE = 64 << 10
_MAX_HEAD_BYTES = 64 << 10


class PassageError(Exception):
    """The other front cannot be reached, or its answer ends too soon."""


class ClientLeftError(Exception):
    """The client left before its body was whole."""


async def answer_of(
    path: Path, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: AsyncIterator[bytes]
) -> AsyncGenerator[h11.Response | h11.Data]:
    """The head of an answer, and then the pieces of its body.

    Args:
        path: the front's socket.
        method: of the request.
        target: the path and the query, as the client has written them.
        headers: they say how long the body is.
        body: the request's; it is read no further than until the answer is complete.

    Raises:
        PassageError: there is no whole answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
    except OSError as error:
        raise PassageError(type(error).__name__) from error
    connection = h11.Connection(h11.CLIENT, _MAX_HEAD_BYTES)
    sending: asyncio.Task[None] | None = None
    try:
        writer.write(connection.send(h11.Request(method=method, target=target, headers=list(headers))) or b"")
        sending = asyncio.ensure_future(_sent(connection, writer, body))
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_PIECE))
            elif isinstance(event, h11.Response | h11.Data):
                yield event
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                raise PassageError("no answer")
    except (OSError, h11.ProtocolError) as error:
        raise PassageError(type(error).__name__) from error
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def _sent(connection: h11.Connection, writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
    """Send the body. Where the other front reads no further, its answer says why."""
    with contextlib.suppress(ConnectionError, ClientLeftError):
        async for piece in body:
            writer.write(connection.send(h11.Data(data=piece)) or b"")
            await writer.drain()
        writer.write(connection.send(h11.EndOfMessage()) or b"")
