"""What is written to a connection in one turn of the event loop goes out in one piece."""

from __future__ import annotations

import asyncio
from typing import Any

# What is more than a socket takes at once gains nothing by waiting.
_MAX_BYTES = 64 << 10


class CoalescingTransport(asyncio.Transport):
    """A transport that writes to another one at the end of the turn.

    The head of an answer, its first chunk and its first words are ready at the same time; so are its last words, its
    usage and its end. Sent one by one each would wake the client, which then takes the processor from the server that
    has more to say.
    """

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._held = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send soon."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(bytes(data))
        self._size += len(data)
        if self._size >= _MAX_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            self._inner.write(data)

    def close(self) -> None:
        """End when all is sent."""
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        """End now."""
        self._pieces.clear()
        self._size = 0
        self._inner.abort()

    def is_closing(self) -> bool:
        """As the other's."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """As the other's."""
        self._paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """As the other's, but not while reading is held."""
        self._paused = False
        if not self._held:
            self._inner.resume_reading()

    def hold_reading(self) -> None:
        """Read nothing until `release_reading`, whatever `resume_reading` says: what came is still being parsed."""
        self._held = True
        self._inner.pause_reading()

    def release_reading(self) -> None:
        """Read again, unless reading is paused."""
        self._held = False
        if not self._paused:
            self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the other's."""
        return self._inner.get_extra_info(name, default)
