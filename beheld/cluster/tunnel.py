"""Carries connections to a server on one host's loopback interface to processes of other hosts that know a token.

    first host    server <- loopback <- TunnelDoor (a Door at the host's address)
    another host  TunnelEnd (on its loopback interface) <- what connects there as if the server were on its own host

What has no token of its own, such as torch.distributed's store, is then reached by no one else in the network.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from beheld.cluster.handshake import Door, connect
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_LOOPBACK = "127.0.0.1"
_LOOK_S = 1.0
# After a failure to take a connection; and for connecting to a server of this host.
_PAUSE_S, _CONNECT_S = 0.1, 10.0
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
            try:
                found = self._door.accept(_LOOK_S)
            except OSError as error:
                # No descriptor is left, for example.
                logger.warning("A connection of another host cannot be taken: %s.", error)
                self._closing.wait(_PAUSE_S)
                continue
            if found is not None:
                _lead(found[1], lambda: socket.create_connection((_LOOPBACK, self._server), _CONNECT_S))
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
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="beheld-tunnel-end", daemon=True).start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                end, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.warning("A connection to another host cannot be taken: %s.", error)
                self._closing.wait(_PAUSE_S)
                continue
            _lead(end, lambda: connect(*self._there, 0, self._token))

    def close(self) -> None:
        """Listen no more."""
        self._closing.set()
        with suppress(OSError):
            # Closing alone does not wake who waits.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _lead(one: socket.socket, other: Callable[[], socket.socket]) -> None:
    """Connect to the other side and carry bytes both ways, in threads, until a side closes; keeps nobody waiting."""
    try:
        threading.Thread(target=_carry, args=(one, other), name="beheld-tunnel", daemon=True).start()
    except RuntimeError as error:
        logger.warning("A connection between hosts ends: %s.", error)
        one.close()


def _carry(one: socket.socket, connected: Callable[[], socket.socket]) -> None:
    with one:
        try:
            other = connected()
        except OSError as error:
            logger.debug("A connection ends: %s.", error)
            return
        with other:
            for each in (one, other):
                each.settimeout(None)
                # What waits for an answer is sent at once, and a host that is gone is noticed.
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            back = threading.Thread(target=_copy, args=(other, one), name="beheld-tunnel", daemon=True)
            try:
                back.start()
            except RuntimeError as error:
                logger.warning("A connection between hosts ends: %s.", error)
                return
            _copy(one, other)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(_PIECE):
            target.sendall(piece)
    except OSError as error:
        logger.debug("A connection ends: %s.", error)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
