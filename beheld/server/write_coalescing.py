"""Combines all writes to a connection in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

# Larger data gains nothing from waiting, because the socket does not accept it at once.
_MAX_BYTES = 64 << 10


class CoalescingTransport(asyncio.Transport):
    """A transport that writes to an inner transport at the end of the loop's turn.

    The head of a response, its first chunk and its first text are ready at the same time, and so are its last text, its
    usage and its end. Sent one by one, each would wake the client, which then takes the processor from the server.
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
        """Send at the end of the turn."""
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

    def get_write_buffer_size(self) -> int:
        """As the inner transport's."""
        return self._inner.get_write_buffer_size()

    def close(self) -> None:
        """Close after sending everything."""
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        """Close at once."""
        self._pieces.clear()
        self._size = 0
        self._inner.abort()

    def is_closing(self) -> bool:
        """As the inner transport's."""
        return self._inner.is_closing()

    def pause_reading(self) -> None:
        """As the inner transport's."""
        self._paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """As the inner transport's, but not while reading is held."""
        self._paused = False
        if not self._held:
            self._inner.resume_reading()

    def hold_reading(self) -> None:
        """Stop reading until `release_reading`, even after `resume_reading`: received data is still being parsed."""
        self._held = True
        self._inner.pause_reading()

    def release_reading(self) -> None:
        """Read again, unless reading is paused."""
        self._held = False
        if not self._paused:
            self._inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the inner transport's."""
        return self._inner.get_extra_info(name, default)
