"""Clients that attack what a front of a server passes on to another; `python -m` with PORT ATTACK: for a second."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASKED = b'{"input": "x", "max_output_tokens": 200, "stream": true}'


def tiny_chunks(link: socket.socket) -> None:
    """A body in chunks of one byte."""
    link.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        link.sendall(b"1\r\n \r\n" * 100)


def single_bytes(link: socket.socket) -> None:
    """A body of known length, a byte at a time."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(HEAD + b"Content-Length: 2000\r\n\r\n")
    for _ in range(2000):
        link.sendall(b" ")


def pipelined(link: socket.socket) -> None:
    """Many requests at once, whose answers are not all read."""
    link.sendall(b"GET /v1/responses/x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
    link.recv(1 << 16)


def closing(link: socket.socket) -> None:
    """A body that ends too soon, and an answer that nobody reads; both reset the connection."""
    if random.random() < 0.5:
        link.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * random.randrange(60_000))
    else:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED)
        time.sleep(random.random() / 20)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def idle(link: socket.socket) -> None:
    """A connection that says nothing."""
    time.sleep(0.5)


ATTACKS: dict[str, Callable[[socket.socket], None]] = {
    each.__name__: each for each in (tiny_chunks, single_bytes, pipelined, closing, idle)
}


def _strike(port: int, attack: Callable[[socket.socket], None], until: float) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
            link.settimeout(5)
            attack(link)


def main(port: int, name: str) -> None:
    """Attack for a second."""
    print("begin", flush=True)
    until, count = time.monotonic() + 1, 100 if name == "idle" else 6
    with ThreadPoolExecutor(count) as threads:
        for each in [threads.submit(_strike, port, ATTACKS[name], until) for _ in range(count)]:
            each.result()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
