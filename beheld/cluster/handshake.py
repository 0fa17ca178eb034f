"""Connections between hosts on which each side proves that it knows a token, without sending it.

    client -> server    magic | its number | its nonce
    server -> client    its nonce | HMAC-SHA256(token, "server" | number | both nonces)
    client -> server    HMAC-SHA256(token, "client" | number | both nonces)

What follows is not encrypted: the hosts of a cluster share a network that others cannot read.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator

_MAGIC = b"bhl1"
_HELLO = struct.Struct("<4sI16s")
_NONCE, _DIGEST = 16, 32
# A connection that is not proved by then is closed.
_PROVED_S = 5.0
# So many connections prove themselves at once; a further one closes the oldest, whose process would be done by then.
_MAX_ARRIVALS = 64


def new_token() -> bytes:
    """Return a secret for one group of processes."""
    return secrets.token_bytes(32)


def _proof(token: bytes, side: bytes, number: int, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, side + struct.pack("<I", number) + client + server, "sha256")


def _taken(end: socket.socket, size: int, until: float) -> bytes:
    """Return so many bytes; `until` is by time.monotonic, for all of them together."""
    found = b""
    while len(found) < size:
        # 0 would mean not to wait at all, which is another error.
        end.settimeout(max(0.001, until - time.monotonic()))
        found += _some(end, size - len(found))
    return found


def _some(end: socket.socket, most: int) -> bytes:
    found = end.recv(most)
    if not found:
        raise ConnectionError("the other side has closed")
    return found


class _Arrival:
    """A connection that has yet to prove that it knows the token; others are waited for meanwhile.

    Attributes:
        end: the connection.
        until: when its time is up, by time.monotonic.
    """

    def __init__(self, end: socket.socket, token: bytes) -> None:
        self.end, self.until = end, time.monotonic() + _PROVED_S
        end.setblocking(False)
        self._proof = self._proved(token)
        next(self._proof)

    def go_on(self) -> int | None:
        """Read what has come; return the process's number once it is proved.

        Raises:
            OSError: it does not know the token, or has closed.
        """
        try:
            next(self._proof)
        except StopIteration as done:
            number: int = done.value
            return number
        return None

    def _proved(self, token: bytes) -> Generator[None, None, int]:
        magic, number, client = _HELLO.unpack((yield from self._taken(_HELLO.size)))
        if magic != _MAGIC:
            raise ConnectionError("this is no process of beheld's")
        server = secrets.token_bytes(_NONCE)
        self.end.sendall(server + _proof(token, b"server", number, client, server))
        proof = yield from self._taken(_DIGEST)
        if not hmac.compare_digest(proof, _proof(token, b"client", number, client, server)):
            raise ConnectionError("it does not know the token")
        return int(number)

    def _taken(self, size: int) -> Generator[None, None, bytes]:
        found = b""
        while len(found) < size:
            yield
            try:
                found += _some(self.end, size - len(found))
            except BlockingIOError:
                continue
        return found


class Door:
    """Listens at one address for processes that know the token.

    Args:
        address: of this host, and of no other interface.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._listener = socket.create_server((address, 0), family=_family(address))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._listener, selectors.EVENT_READ)
        # By descriptor, in the order in which they came.
        self._arrivals: dict[int, _Arrival] = {}

    def accept(self, timeout_s: float) -> tuple[int, socket.socket] | None:
        """Return the next process's number and its connection; None if none has proved within the time that it is one.

        A connection that says nothing, or does not know the token, keeps no other one waiting.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            ends = min((each.until for each in self._arrivals.values()), default=until) - time.monotonic()
            for key, _ in self._waiting.select(max(0.0, min(left, ends))):
                arrival = self._arrivals.get(key.fd)
                found = None if arrival is None else self._asked(arrival)
                if found is not None:
                    return found
                if key.fileobj is self._listener:
                    self._admit()
            now = time.monotonic()
            for each in [each for each in self._arrivals.values() if each.until <= now]:
                self._let_go(each).close()
        return None

    def _admit(self) -> None:
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            # Who left again while it was waiting.
            return
        if len(self._arrivals) == _MAX_ARRIVALS:
            self._let_go(next(iter(self._arrivals.values()))).close()
        self._arrivals[end.fileno()] = _Arrival(end, self._token)
        self._waiting.register(end, selectors.EVENT_READ)

    def _asked(self, arrival: _Arrival) -> tuple[int, socket.socket] | None:
        """Let a connection go on with its proof; return it once that is done."""
        try:
            number = arrival.go_on()
        except OSError:
            self._let_go(arrival).close()
            return None
        if number is None:
            return None
        end = self._let_go(arrival)
        end.settimeout(None)
        return number, end

    def _let_go(self, arrival: _Arrival) -> socket.socket:
        self._waiting.unregister(arrival.end)
        del self._arrivals[arrival.end.fileno()]
        return arrival.end

    def close(self) -> None:
        """Stop listening, and close what is not proved."""
        for each in list(self._arrivals.values()):
            self._let_go(each).close()
        self._waiting.close()
        self._listener.close()


def connect(address: str, port: int, number: int, token: bytes, timeout_s: float = 30.0) -> socket.socket:
    """Connect to a Door.

    Raises:
        OSError: it cannot be reached, or does not know the token.
    """
    end = socket.create_connection((address, port), timeout_s)
    try:
        until = time.monotonic() + max(_PROVED_S, timeout_s)
        client = secrets.token_bytes(_NONCE)
        end.sendall(_HELLO.pack(_MAGIC, number, client))
        answer = _taken(end, _NONCE + _DIGEST, until)
        server = answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _proof(token, b"server", number, client, server)):
            raise ConnectionError("the other side does not know the token")
        end.sendall(_proof(token, b"client", number, client, server))
    except BaseException:
        end.close()
        raise
    end.settimeout(None)
    return end


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
