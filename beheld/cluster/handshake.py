"""Connections between hosts on which each side proves that it knows a token, without sending it.

    client -> server    magic | its number | its nonce
    server -> client    its nonce | HMAC-SHA256(token, "server" | number | both nonces)
    client -> server    HMAC-SHA256(token, "client" | number | both nonces)

What follows is not encrypted: the hosts of a cluster share a network that others cannot read.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

_MAGIC = b"bhl1"
_HELLO = struct.Struct("<4sI16s")
_NONCE, _DIGEST = 16, 32
# A connection that is not proved by then is closed, so that it keeps no other one waiting.
_PROVED_S = 5.0


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
        more = end.recv(size - len(found))
        if not more:
            raise ConnectionError("the other side has closed")
        found += more
    return found


class Door:
    """Listens at one address for processes that know the token.

    Args:
        address: of this host, and of no other interface.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._listener = socket.create_server((address, 0), family=_family(address))
        self.port: int = self._listener.getsockname()[1]

    def accept(self, timeout_s: float) -> tuple[int, socket.socket] | None:
        """Return the next process's number and its connection; None if none came, or it does not know the token."""
        self._listener.settimeout(timeout_s)
        try:
            end, _ = self._listener.accept()
        except (TimeoutError, ConnectionError):
            # Also who left again while it was waiting.
            return None
        until = time.monotonic() + _PROVED_S
        try:
            magic, number, client = _HELLO.unpack(_taken(end, _HELLO.size, until))
            if magic != _MAGIC:
                raise ConnectionError("this is no process of beheld's")
            server = secrets.token_bytes(_NONCE)
            end.sendall(server + _proof(self._token, b"server", number, client, server))
            if not hmac.compare_digest(
                _taken(end, _DIGEST, until), _proof(self._token, b"client", number, client, server)
            ):
                raise ConnectionError("it does not know the token")
        except OSError:
            end.close()
            return None
        end.settimeout(None)
        return number, end

    def close(self) -> None:
        """Stop listening."""
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
