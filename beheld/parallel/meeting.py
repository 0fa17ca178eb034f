"""Where the ranks of a group find each other: a folder of one host, or the first rank's address."""

from __future__ import annotations

import datetime
import fcntl
import socket
import struct
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
        """Name it for `meeting_at`."""


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


class Address:
    """The first rank's address, where torch.distributed's store listens, and nowhere else.

    Args:
        host, port: of the first rank.
        address: of this rank.
        store: the first rank's own; None elsewhere.
    """

    one_host = False

    def __init__(self, host: str, port: int, address: str, store: Any = None, name: str = "") -> None:
        self._host, self._port, self._store, self._name = host, port, store, name
        self.address = address

    @classmethod
    def opened(cls, host: str) -> Address:
        """Return the first rank's, which listens at an address of this host."""
        from torch import distributed

        dist: Any = distributed
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        # It takes the descriptor over.
        store = dist.TCPStore(
            host, port, is_master=True, timeout=_CONNECT, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return cls(host, port, host, store)

    def part(self, name: str) -> Address:
        """See Meeting."""
        return Address(self._host, self._port, self.address, self._store, name)

    def store(self, size: int) -> Any:
        """See Meeting."""
        from torch import distributed

        dist: Any = distributed
        if self._store is None:
            self._store = dist.TCPStore(
                self._host, self._port, is_master=False, timeout=_CONNECT, wait_for_workers=False
            )
        return dist.PrefixStore(self._name, self._store)

    def __str__(self) -> str:
        """See Meeting."""
        return f"{_TCP}{self._host}|{self._port}"


_TCP = "tcp|"


def meeting_at(text: str, address: str | None) -> Meeting:
    """Return the meeting that the first rank has named.

    Args:
        address: of this rank, if others are on other hosts.
    """
    if address is None:
        return Folder(Path(text))
    host, _, port = text.removeprefix(_TCP).rpartition("|")
    return Address(host, int(port), address)


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
