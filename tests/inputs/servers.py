"""Small HTTP servers on loopback ports, each of which answers in one way, right or wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

Answer = Callable[[socket.socket, bytes], None]


class Server:
    """Answers each connection on a loopback port with a function of its own; counts and keeps the requests."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.requests: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str = "/p.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    more = connection.recv(4096)
                    if not more:
                        return
                    head += more
                self.requests.append(head)
                self._answer(connection, head)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


def plain(body: bytes, status: str = "200 OK", *fields: str) -> Answer:
    def answer(connection: socket.socket, _: bytes) -> None:
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *fields]
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    return answer
