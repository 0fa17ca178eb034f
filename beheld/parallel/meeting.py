"""Where the ranks of a group find each other: a folder of one host, or torch.distributed's store."""

from __future__ import annotations

import datetime
import fcntl
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

_LOOPBACK = "127.0.0.1"
_CONNECT = datetime.timedelta(seconds=60)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


class Meeting(Protocol):
    """Where ranks find each other.

    Attributes:
        address: at which this rank accepts the connections of the others.
        one_host: all ranks are processes of one machine.
    """

    @property
    def address(self) -> str:
        """See above."""

    @property
    def one_host(self) -> bool:
        """See above."""

    def part(self, name: str) -> Self:
        """Return the meeting of some of the ranks, known by a name."""

    def store(self, size: int) -> Any:
        """Return torch.distributed's store for so many ranks."""

    def __str__(self) -> str:
        """Tell another rank where it is."""


class Folder:
    """A folder that only this user can read. Ranks connect on the loopback interface alone."""

    address = _LOOPBACK
    one_host = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def part(self, name: str) -> Folder:
        """See Meeting."""
        own = self._path / name
        own.mkdir(mode=0o700, exist_ok=True)
        return Folder(own)

    def store(self, size: int) -> Any:
        """See Meeting."""
        from torch import distributed

        dist: Any = distributed
        found = dist.FileStore(str(self._path / "ranks"), size)
        found.set_timeout(_CONNECT)
        return found

    def __str__(self) -> str:
        """See Meeting."""
        return str(self._path)


class Port:
    """A port of this host's loopback interface at which torch.distributed's store is, or a way to the first rank's.

    Anyone who reaches the store may write into it, so it listens nowhere else; cluster/tunnel.py leads there.

    Args:
        address: of this rank.
        store: the first rank's own; None elsewhere.
        elsewhere: tells ranks of other hosts where it is.
    """

    one_host = False

    def __init__(self, port: int, address: str, store: Any = None, elsewhere: str = "", name: str = "") -> None:
        self._port, self._store, self._elsewhere, self._name = port, store, elsewhere, name
        self.address = address

    @classmethod
    def opened(cls, address: str, lead: Callable[[int], str]) -> Port:
        """Return the first rank's, on a host with this address.

        Args:
            lead: leads other hosts to a port of this one, and tells where.
        """
        from torch import distributed

        dist: Any = distributed
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        # It takes the descriptor over.
        store = dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=_CONNECT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(port, address, store, lead(port))

    def part(self, name: str) -> Port:
        """See Meeting."""
        return Port(self._port, self.address, self._store, self._elsewhere, name)

    def store(self, size: int) -> Any:
        """See Meeting."""
        from torch import distributed

        dist: Any = distributed
        if self._store is None:
            self._store = dist.TCPStore(
                _LOOPBACK, self._port, is_master=False, timeout=_CONNECT, wait_for_workers=False
            )
        return dist.PrefixStore(self._name, self._store)

    def __str__(self) -> str:
        """See Meeting."""
        return self._elsewhere


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # It has no address of this kind.
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
