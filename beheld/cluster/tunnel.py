"""Carries connections to a server on one host's loopback interface to processes of other hosts that know a token.

    first host    server <- loopback <- TunnelDoor (a Door at the host's address)
    another host  TunnelEnd (on its loopback interface) <- what connects there as if the server were on its own host

What has no token of its own, such as torch.distributed's store, is then reached by no one else in the network.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from beheld.cluster.handshake import Door, connect
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_LOOPBACK = "127.0.0.1"
_LOOK_S = 1.0
_PIECE = 1 << 16


class TunnelDoor:
    """Lets processes that know the token reach a server on this host's loopback interface.

    Args:
        address: of this host, where they connect.
        port: the server's.
    """

    def __init__(self, address: str, token: bytes, port: int) -> None:
        self._door, self._server = Door(address, token), port
        self.port = self._door.port
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="beheld-tunnel-door", daemon=True).start()

    def _run(self) -> None:
        while not self._closing.is_set():
            found = self._door.accept(_LOOK_S)
            if found is None:
                continue
            try:
                _carry(found[1], socket.create_connection((_LOOPBACK, self._server)))
            except OSError as error:
                logger.debug("A connection ends: %s.", error)
                found[1].close()
        self._door.close()

    def close(self) -> None:
        """Let no one in any more, from a second later on. Connections stay until one of their sides closes."""
        self._closing.set()


class TunnelEnd:
    """A port of this host's loopback interface that leads through a TunnelDoor of another host.

    Args:
        address, port: of the TunnelDoor.

    Attributes:
        port: where to connect.
    """

    def __init__(self, address: str, port: int, token: bytes) -> None:
        self._there, self._token = (address, port), token
        self._listener = socket.create_server((_LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, name="beheld-tunnel-end", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            try:
                _carry(end, connect(*self._there, 0, self._token))
            except OSError as error:
                logger.debug("A connection ends: %s.", error)
                end.close()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            # Closing alone does not wake who waits.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways, in threads, until a side closes."""
    back = threading.Thread(target=_copy, args=(other, one), name="beheld-tunnel", daemon=True)

    def forth() -> None:
        _copy(one, other)
        back.join()
        one.close()
        other.close()

    back.start()
    threading.Thread(target=forth, name="beheld-tunnel", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    except OSError as error:
        logger.debug("A connection ends: %s.", error)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
