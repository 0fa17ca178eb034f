"""A pair of sockets over which values go as frames, large ones through shared memory.

    frame    magic (4 bytes) | place | length of the label | length of the body | label | body, if it lies inline

Every frame is one packet, so a broken one takes no other with it: the kernel keeps where each begins and ends. The
label is the sender's to write. It stands outside the body, so that of a body that cannot be read it can still be said
whom it concerns.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from typing import Any

from beheld.core.errors import ConfigError
from beheld.ipc.codec import Buffer, Codec

MAX_FRAME_BYTES = 4 << 30
# The most in one packet; the buffers of a socket, as they come, hold both together. A larger body goes through a
# memory file.
_INLINE_BYTES = 64 << 10
MAX_LABEL_BYTES = 64 << 10
_HEAD = struct.Struct("<4sBIQ")
_MAGIC = b"bhld"
_INLINE, _SHARED = 0, 1
_MAX_PIECES = 512
_FILE_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))


class FrameError(ValueError):
    """A frame came that cannot be read; what comes after it can.

    Attributes:
        label: what its sender had written on it; None if that cannot be read either.
    """

    def __init__(self, label: bytes | None) -> None:
        super().__init__("a frame cannot be read")
        self.label = label


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, each for one Link.

    Raises:
        ConfigError: the system has no such sockets.
    """
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        raise ConfigError(
            "This system cannot connect processes as beheld needs it.",
            "Run the engine in a thread and media_workers=0.",
        ) from error


class Link:
    """One end of a pair of sockets. One thread sends, one receives.

    Args:
        end: the socket, one of `pair`'s.
        codec: puts values into bytes; the same on both sides.

    Attributes:
        num_unread: frames that came and could not be read.
    """

    def __init__(self, end: socket.socket, codec: Codec) -> None:
        self._end = end
        self._codec = codec
        self._packet = bytearray(_HEAD.size + MAX_LABEL_BYTES + _INLINE_BYTES)
        self.num_unread = 0

    def send(self, value: Any, timeout_s: float | None = None, *, label: bytes = b"") -> None:
        """Send a value.

        Raises:
            ConfigError: it cannot leave the process.
            OSError: the other end is gone, or takes nothing for that long (TimeoutError).
        """
        assert len(label) <= MAX_LABEL_BYTES
        pieces = self._codec.encode(value)
        size = sum(map(len, pieces))
        self._allow(timeout_s)
        if size <= _INLINE_BYTES:
            self._end.send(b"".join([_HEAD.pack(_MAGIC, _INLINE, len(label), size), label, *pieces]))
            return
        memory = _memory(pieces)
        try:
            socket.send_fds(self._end, [_HEAD.pack(_MAGIC, _SHARED, len(label), size), label], [memory])
        finally:
            os.close(memory)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next value.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: nothing came for that long.
            FrameError: what came cannot be read; the next call reads what comes after it.
        """
        self._allow(timeout_s)
        try:
            count, told, flags, _ = self._end.recvmsg_into([self._packet], _FILE_SPACE, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error
        files = _files(told)
        try:
            if not count:
                raise EOFError
            label, body = self._parts(memoryview(self._packet)[:count], files, flags)
            return self._read(label, body)
        except FrameError:
            self.num_unread += 1
            raise
        finally:
            for file in files:
                os.close(file)

    def _parts(self, packet: memoryview, files: list[int], flags: int) -> tuple[bytes, memoryview | tuple[int, int]]:
        """Label, and either the body or the file and the size where it lies."""
        if flags & socket.MSG_TRUNC or len(packet) < _HEAD.size:
            raise FrameError(None)
        magic, place, num_label, size = _HEAD.unpack_from(packet)
        rest = packet[_HEAD.size :]
        inline = size if place == _INLINE else 0
        known = magic == _MAGIC and place in (_INLINE, _SHARED)
        if not known or size > MAX_FRAME_BYTES or num_label + inline != len(rest):
            raise FrameError(None)
        label = bytes(rest[:num_label])
        if place == _INLINE:
            return label, rest[num_label:]
        if len(files) != 1:
            raise FrameError(label)
        return label, (files[0], size)

    def _read(self, label: bytes, body: memoryview | tuple[int, int]) -> Any:
        try:
            # A copy, for the next packet comes to the same place, and arrays lie where they arrived.
            return self._codec.decode(_content(*body) if isinstance(body, tuple) else bytearray(body))
        except Exception as error:
            # Also MemoryError, OSError of a file that is none, and what constructors refuse.
            raise FrameError(label) from error

    def _allow(self, timeout_s: float | None) -> None:
        if self._end.gettimeout() != timeout_s:
            self._end.settimeout(timeout_s)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


def _files(told: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a packet."""
    found = array("i")
    for level, kind, data in told:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


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

    if os.fstat(file).st_size < size:
        raise ValueError("the frame's memory is too short")
    # Not a bytearray, which would be filled with zeros first.
    body = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        count = os.preadv(file, [body[done:]], done)
        if count == 0:
            raise ValueError("the frame's memory is too short")
        done += count
    return body
