"""TLS of the server's connections: its settings are uvicorn's, its connections asyncio's."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from typing import Any

from uvicorn.config import create_ssl_context

from beheld.core.errors import ConfigError
from beheld.server.admission import Places
from beheld.server.options import ServerOptions
from beheld.server.slowest import Slowest


def settings(options: ServerOptions) -> dict[str, Any]:
    """Return uvicorn's options of TLS; none if the server does not speak it.

    Raises:
        ConfigError: a file cannot be read, or does not fit the others.
    """
    if options.ssl_certfile is None:
        return {}
    for option in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        name = getattr(options, option)
        # OpenSSL's error does not say which file it means.
        if name is not None and not os.path.exists(name):
            raise ConfigError(
                f"TLS cannot be set up: there is no file {str(name)!r}.",
                f"Check --{option.replace('_', '-')}.",
                param=option,
            )
    found = {
        "ssl_certfile": options.ssl_certfile,
        "ssl_keyfile": options.ssl_keyfile,
        "ssl_ca_certs": options.ssl_ca_certs,
        "ssl_cert_reqs": options.ssl_cert_reqs,
        **({} if options.ssl_ciphers is None else {"ssl_ciphers": options.ssl_ciphers}),
    }
    try:
        create_ssl_context(
            options.ssl_certfile,
            options.ssl_keyfile,
            # Asked for on the terminal otherwise, which a server may not have.
            password=_NO_PASSWORD,
            ssl_version=ssl.PROTOCOL_TLS_SERVER,
            cert_reqs=options.ssl_cert_reqs,
            ca_certs=options.ssl_ca_certs,
            ciphers=options.ssl_ciphers,
        )
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise ConfigError(
            f"TLS cannot be set up: {words}.",
            "Check --ssl-certfile, --ssl-keyfile, --ssl-ca-certs and --ssl-ciphers; the key must have no password.",
            param="ssl_certfile",
        ) from error
    return found


_NO_PASSWORD = " "

# Seconds that a client has to read the rest of an answer and to take leave; asyncio's own number. Then the
# connection is cut, so that less would cut large answers to clients with slow links.
_CLOSE_S = 30.0
# Bytes that the socket's transport takes before it says that it has enough; asyncio's own number.
_MOST_UNSENT = 64 << 10


class Secure:
    """Begins TLS on accepted connections.

    A connection counts among the server's only when its handshake is over. Before, it has one of `most` places, of
    which a client has a part as of those, and `seconds`. Of a client that has its part, the handshake that has lasted
    longest ends for the next one.

    Args:
        context: of the server.
        peer_of: the name of a client by its address.
        seconds: of a handshake.

    Attributes:
        most: handshakes at a time: one takes a millisecond or two of the server's, and the client's time.
    """

    most = 1024

    def __init__(self, context: ssl.SSLContext, peer_of: Callable[[str], str], seconds: float) -> None:
        self._context = context
        self._places = Places(self.most)
        self._begun = Slowest[asyncio.Future[None]]()
        self._peer_of = peer_of
        self._seconds = seconds

    async def connect(self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket) -> None:
        """Serve a connection after its handshake.

        Raises:
            OSError: the client left, took too long, or does not speak TLS.
        """
        try:
            address = accepted.getpeername()
        except OSError:
            accepted.close()
            raise
        peer = self._peer_of(address[0] if isinstance(address, tuple) else "")
        if not self._places.free(peer, 1):
            slowest = self._begun.of(peer)
            if slowest is None:
                accepted.close()
                return
            self._begun.end(peer, slowest)
            # It gives its place back in the next turn of the loop.
            slowest.cancel()
        over = asyncio.get_running_loop().create_future()
        self._places.take(peer)
        self._begun.begin(peer, over)
        try:
            await self._shake_hands(protocol, accepted, over)
        finally:
            self._begun.end(peer, over)
            self._places.give(peer)

    async def _shake_hands(
        self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, over: asyncio.Future[None]
    ) -> None:
        loop = asyncio.get_running_loop()
        made = _Connection(
            loop,
            protocol(),
            self._context,
            over,
            server_side=True,
            ssl_handshake_timeout=self._seconds,
            ssl_shutdown_timeout=_CLOSE_S,
        )
        transport, _ = await loop.connect_accepted_socket(lambda: made, accepted)
        try:
            await over
        except BaseException:
            transport.close()
            raise


class _Connection(sslproto.SSLProtocol):
    """asyncio's TLS with less memory for each connection.

    It receives into a buffer that is as large from the start. What the transport below has not sent yet counts as
    unsent: asyncio leaves it out, so that a client that does not read a large answer is neither counted nor timed.
    """

    max_size = 32 << 10

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The transport below says when it has sent most of what is more than this, and says nothing of less: who waited
        # for less would wait for ever.
        self._set_write_buffer_limits(_MOST_UNSENT + 1, _MOST_UNSENT)  # type: ignore[attr-defined]

    def _get_write_buffer_size(self) -> int:
        below = self._transport
        unsent = below.get_write_buffer_size() if isinstance(below, asyncio.Transport) else 0
        return int(super()._get_write_buffer_size()) + unsent  # type: ignore[misc]
