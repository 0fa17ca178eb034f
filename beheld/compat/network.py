"""What scripts ask of the network: a port that nothing uses."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """A port of the loopback interface that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
