"""The connections that gloo opens, which end what waits on them when they are cut.

A host that is lost closes no connection, and gloo offers no way to end what waits for it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def _sockets() -> dict[str, int]:
    """Return this process's sockets, the system's name of each and its descriptor; none where it does not list them."""
    found: dict[str, int] = {}
    listed: list[Path] = []
    with suppress(OSError):
        listed += Path("/proc/self/fd").iterdir()
    for each in listed:
        with suppress(OSError):
            name = os.readlink(each)
            if name.startswith("socket:"):
                found[name] = int(each.name)
    return found


class Connections:
    """The TCP connections from or to one of this host's addresses that are opened between `__init__` and `opened`.

    Args:
        address: this host's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._before = set(_sockets())
        self._found: dict[str, int] = {}

    def opened(self) -> None:
        """All are open."""
        for name, descriptor in _sockets().items():
            if name not in self._before and self._is_one(descriptor):
                self._found[name] = descriptor

    def _is_one(self, descriptor: int) -> bool:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if end.family != socket.AF_INET or end.type != socket.SOCK_STREAM:
                return False
            # What listens has no other side.
            end.getpeername()
            return bool(end.getsockname()[0] == self._address)
        return False

    def cut(self) -> None:
        """End them in both directions; any thread may call it."""
        for name, descriptor in self._found.items():
            with suppress(OSError):
                # The number may belong to another file by now.
                if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                    with socket.socket(fileno=os.dup(descriptor)) as end:
                        end.shutdown(socket.SHUT_RDWR)
