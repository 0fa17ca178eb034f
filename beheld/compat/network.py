"""What scripts ask of the machine: a port that nothing uses, its address, and a name that nothing has."""

from __future__ import annotations

import socket
import uuid


def get_open_port() -> int:
    """A port of the loopback interface that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def get_open_ports_list(count: int = 5) -> list[int]:
    """Different ports of the loopback interface that nothing uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [int(free.getsockname()[1]) for free in sockets]
    finally:
        for free in sockets:
            free.close()


def get_ip() -> str:
    """This machine's address, or the loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
