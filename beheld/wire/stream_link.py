"""A connection between hosts that carries values as frames, with the methods of Link.

    frame    magic (4 bytes) | length of the label | length of the body | label | body

TCP keeps no boundaries, so a connection whose frame is damaged or stops in the middle is of no use any more: it counts
as closed. A body that cannot be decoded affects no other frame.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from beheld.wire.codec import Codec
from beheld.wire.link import MAX_FRAME_BYTES, MAX_LABEL_BYTES, FrameError

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"bhls"
_MAX_PIECES = 512
# A sender writes a frame at once. If nothing more of one comes for so long, its host is gone.
_STALL_S = 5.0


class StreamLink:
    """One end of a connection. One thread sends, one receives; see Link.

    Args:
        end: a connected TCP socket.
        codec: serializes values; the same on both sides.

    Attributes:
        num_unread: number of received frames that could not be read.
    """

    def __init__(self, end: socket.socket, codec: Codec) -> None:
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._codec = end, codec
        self.num_unread = 0

    def send(self, value: Any, timeout_s: float | None = None, *, label: bytes = b"") -> None:
        """Send a value.

        Raises:
            ConfigError: the value cannot leave the process.
            OSError: the other end has closed, or did not read for `timeout_s` (TimeoutError), and is lost then.
        """
        assert len(label) <= MAX_LABEL_BYTES
        pieces = self._codec.encode(value)
        size = sum(map(len, pieces))
        left = [memoryview(each) for each in (_HEAD.pack(_MAGIC, len(label), size), label, *pieces) if len(each)]
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while left:
            try:
                self._wait(select.POLLOUT, until)
            except TimeoutError:
                self.cut()
                raise
            done = self._end.sendmsg(left[:_MAX_PIECES], (), 0 if until is None else socket.MSG_DONTWAIT)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Raises:
            EOFError: the other end has closed or is lost.
            TimeoutError: nothing arrived for `timeout_s`.
            FrameError: the frame cannot be read; the next call reads the next frame.
        """
        try:
            self._wait(select.POLLIN, None if timeout_s is None else time.monotonic() + timeout_s)
        except ConnectionError as error:
            raise EOFError from error
        magic, num_label, size = _HEAD.unpack(self._taken(_HEAD.size))
        if magic != _MAGIC or num_label > MAX_LABEL_BYTES or size > MAX_FRAME_BYTES:
            self.cut()
            raise EOFError
        label = bytes(self._taken(num_label))
        body = self._taken(size)
        try:
            return self._codec.decode(body)
        except Exception as error:
            # Includes MemoryError, and errors that constructors raise.
            self.num_unread += 1
            raise FrameError(label) from error

    def _taken(self, size: int) -> bytearray:
        """Return the next bytes, no more: what follows must still show when the socket is polled."""
        found = bytearray(size)
        left = memoryview(found)
        while left:
            try:
                self._wait(select.POLLIN, time.monotonic() + _STALL_S)
                count = self._end.recv_into(left)
            except OSError as error:
                self.cut()
                raise EOFError from error
            if count == 0:
                raise EOFError
            left = left[count:]
        return found

    def _wait(self, event: int, until: float | None) -> None:
        """Wait until the socket is ready or its other end closed.

        Raises:
            ConnectionError: this end is closed.
            TimeoutError: the moment `until` (time.monotonic) has come before.
        """
        file = self._end.fileno()
        if file < 0:
            raise ConnectionError("this end is closed")
        waiting = select.poll()
        waiting.register(file, event)
        if not waiting.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._end.fileno()

    def cut(self) -> None:
        """End the connection from any thread: what waits in `send` or `receive` of either side fails."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It has ended already.
            return

    def close(self) -> None:
        """Close this end."""
        self.cut()
        self._end.close()
