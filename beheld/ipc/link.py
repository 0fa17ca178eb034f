"""A pair of sockets over which values go as frames, large ones through shared memory."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from beheld.ipc.codec import Buffer, Codec

MAX_FRAME_BYTES = 4 << 30
# Below this, copying through the socket costs less than making a memory file.
_SHARED_BYTES = 256 << 10
_HEAD = struct.Struct("<QB")
_INLINE, _SHARED = 0, 1
_MAX_PIECES = 512


class Link:
    """One end of a pair of sockets. One thread sends, one receives.

    Args:
        end: the socket.
        codec: puts values into bytes; the same on both sides.
    """

    def __init__(self, end: socket.socket, codec: Codec) -> None:
        self._end = end
        self._codec = codec

    def send(self, value: Any, timeout_s: float | None = None) -> None:
        """Send a value.

        Raises:
            ConfigError: it cannot leave the process.
            OSError: the other end is gone, or takes nothing for that long (TimeoutError).
        """
        pieces = self._codec.encode(value)
        size = sum(map(len, pieces))
        self._end.settimeout(timeout_s)
        if size < _SHARED_BYTES or not hasattr(os, "memfd_create"):
            self._end.sendall(b"".join([_HEAD.pack(size, _INLINE), *pieces]))
            return
        memory = _memory(pieces)
        try:
            socket.send_fds(self._end, [_HEAD.pack(size, _SHARED)], [memory])
        finally:
            os.close(memory)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next value.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing came for that long; the link is of no use afterwards.
            ValueError: what came is not a frame.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        head, files = self._head(deadline)
        try:
            size, place = _HEAD.unpack(head)
            if size > MAX_FRAME_BYTES:
                raise ValueError("the frame is too large")
            if place == _INLINE:
                return self._codec.decode(self._exactly(size, deadline))
            if place != _SHARED or len(files) != 1:
                raise ValueError("the frame's memory is missing")
            return self._codec.decode(_content(files[0], size))
        finally:
            for file in files:
                os.close(file)

    def _head(self, deadline: float | None) -> tuple[bytes, list[int]]:
        head, files = b"", []
        while len(head) < _HEAD.size:
            try:
                self._wait_until(deadline)
                part, came, _, _ = socket.recv_fds(self._end, _HEAD.size - len(head), 1)
            except TimeoutError:
                raise
            except OSError as error:
                raise EOFError from error
            files += came
            if not part:
                raise EOFError
            head += part
        return head, files

    def _exactly(self, size: int, deadline: float | None) -> bytearray:
        body = bytearray(size)
        view = memoryview(body)
        done = 0
        while done < size:
            try:
                self._wait_until(deadline)
                count = self._end.recv_into(view[done:])
            except TimeoutError:
                raise
            except OSError as error:
                raise EOFError from error
            if count == 0:
                raise EOFError
            done += count
        return body

    def _wait_until(self, deadline: float | None) -> None:
        if deadline is None:
            self._end.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._end.settimeout(left)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def _memory(pieces: list[Buffer]) -> int:
    """A memory file that holds the pieces; the caller closes it. The kernel copies, and the interpreter goes on."""
    file = os.memfd_create("beheld", os.MFD_CLOEXEC)
    try:
        for first in range(0, len(pieces), _MAX_PIECES):
            left = [memoryview(piece) for piece in pieces[first : first + _MAX_PIECES] if len(piece)]
            while left:
                done = os.writev(file, left)
                while left and done >= len(left[0]):
                    done -= len(left.pop(0))
                if done:
                    left[0] = left[0][done:]
    except BaseException:
        os.close(file)
        raise
    return file


def _content(file: int, size: int) -> memoryview:
    """What the file holds, in memory of our own.

    Mapping it instead would save the copy, and would cost a descriptor for as long as an item is kept in a cache, and
    the sender could still change it.
    """
    import numpy as np

    # Not a bytearray, which would be filled with zeros first.
    body = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        count = os.preadv(file, [body[done:]], done)
        if count == 0:
            raise ValueError("the frame's memory is too short")
        done += count
    return body
