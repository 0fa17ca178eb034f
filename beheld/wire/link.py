"""A pair of sockets that carries values as frames; large ones go through shared memory.

    frame    magic (4 bytes) | place | length of the label | length of the body | label | body, if it is inline

Every frame is one packet, so the kernel keeps the boundaries and a broken frame affects no other. The sender chooses
the label. It is outside of the body and identifies the message even if the body cannot be read.

A large body is in a memory file that is sent with the packet: a new one, or one that the sender keeps and reuses, whose
pages are already allocated and mapped.

    kept file    1 until it is read, then 0 | gap to _KEPT_HEAD | body
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

from beheld.core.errors import ConfigError
from beheld.wire.codec import Buffer, Codec

MAX_FRAME_BYTES = 4 << 30
# The largest inline body. Two such packets fit into a socket's default buffers. A larger body goes through a memory
# file.
_INLINE_BYTES = 64 << 10
MAX_LABEL_BYTES = 64 << 10
_HEAD = struct.Struct("<4sBIQ")
_MAGIC = b"bhld"
_INLINE, _SHARED, _KEPT = 0, 1, 2
_KEPT_HEAD = 64
_UNREAD, _READ = b"\1".ljust(_KEPT_HEAD, b"\0"), b"\0"
# Larger bodies are rare, and mapping their pages takes little time compared with producing their content.
_MAX_KEPT_BYTES = 8 << 20
_MAX_PIECES = 512
_FILE_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.ETOOMANYREFS))


class NoRoomError(OSError):
    """There is no descriptor or no memory for a large frame, which is not sent; the connection is as it was."""


class FrameError(ValueError):
    """A received frame cannot be read; the following frames can.

    Attributes:
        label: the frame's label; None if it cannot be read either.
    """

    def __init__(self, label: bytes | None) -> None:
        super().__init__("a frame cannot be read")
        self.label = label


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, each for one Link.

    Raises:
        ConfigError: the system has no sockets of this kind.
    """
    try:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError) as error:
        raise ConfigError(
            "This system lacks the sockets that connect beheld's processes.",
            "Run the engine in a thread and media_workers=0.",
        ) from error


class Link:
    """One end of a pair of sockets. One thread sends, one receives.

    Args:
        end: the socket, from `pair`.
        codec: serializes values; the same on both sides.
        max_kept: number of memory files, of up to 8 MiB each, that are kept for further bodies. The other end can read
            and write them as long as they are kept, so use 0 for an untrusted end.

    Attributes:
        num_unread: number of received frames that could not be read.
    """

    def __init__(self, end: socket.socket, codec: Codec, max_kept: int = 0) -> None:
        self._end = end
        self._codec = codec
        self._max_kept = max_kept
        self._kept: list[int] = []
        # `close` must not wait for a send, and a file must not be closed while it is written.
        self._keeping = threading.Lock()
        self._packet = bytearray(_HEAD.size + MAX_LABEL_BYTES + _INLINE_BYTES)
        self.num_unread = 0

    def send(self, value: Any, timeout_s: float | None = None, *, label: bytes = b"") -> None:
        """Send a value.

        Raises:
            ConfigError: the value cannot leave the process.
            NoRoomError: it is large, and the system has no room for it now.
            OSError: the other end has closed, or did not read for `timeout_s` (TimeoutError).
        """
        assert len(label) <= MAX_LABEL_BYTES
        pieces = self._codec.encode(value)
        size = sum(map(len, pieces))
        self._allow(timeout_s)
        if size <= _INLINE_BYTES:
            self._end.send(b"".join([_HEAD.pack(_MAGIC, _INLINE, len(label), size), label, *pieces]))
            return
        try:
            self._send_file(pieces, size, label)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            raise NoRoomError(error.errno, error.strerror) from error

    def _send_file(self, pieces: list[Buffer], size: int, label: bytes) -> None:
        """Send a frame whose body is in a memory file."""
        kept = self._written(pieces) if size <= _MAX_KEPT_BYTES else None
        if kept is not None:
            try:
                socket.send_fds(self._end, [_HEAD.pack(_MAGIC, _KEPT, len(label), size), label], [kept])
            except OSError:
                # Nobody will read it.
                with self._keeping:
                    self._forget(kept)
                raise
            return
        memory = _memory()
        try:
            _write(memory, pieces)
            socket.send_fds(self._end, [_HEAD.pack(_MAGIC, _SHARED, len(label), size), label], [memory])
        finally:
            os.close(memory)

    def _written(self, pieces: list[Buffer]) -> int | None:
        """A kept file that holds the pieces; None if the maximum exists and all are still unread.

        A file that the reader never marks as read is not reused.
        """
        with self._keeping:
            file = next((file for file in self._kept if os.pread(file, 1, 0) == _READ), None)
            if file is None:
                if len(self._kept) >= self._max_kept:
                    return None
                file = _memory()
                self._kept.append(file)
            os.lseek(file, 0, os.SEEK_SET)
            try:
                _write(file, [_UNREAD, *pieces])
            except OSError:
                self._forget(file)
                raise
            return file

    def _forget(self, file: int) -> None:
        """Close a kept file, unless `close` did."""
        if file in self._kept:
            self._kept.remove(file)
            os.close(file)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next value.

        Raises:
            EOFError: the other end has closed.
            TimeoutError: nothing arrived for `timeout_s`.
            FrameError: the frame cannot be read; the next call reads the next frame.
        """
        self._allow(timeout_s)
        try:
            count, ancillary, flags, _ = self._end.recvmsg_into([self._packet], _FILE_SPACE, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError from error
        files = _files(ancillary)
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

    def _parts(self, packet: memoryview, files: list[int], flags: int) -> tuple[bytes, memoryview | _Place]:
        """The label, and either the body or its place."""
        if flags & socket.MSG_TRUNC or len(packet) < _HEAD.size:
            raise FrameError(None)
        magic, place, num_label, size = _HEAD.unpack_from(packet)
        rest = packet[_HEAD.size :]
        inline = size if place == _INLINE else 0
        known = magic == _MAGIC and place in (_INLINE, _SHARED, _KEPT)
        if not known or size > MAX_FRAME_BYTES or num_label + inline != len(rest):
            raise FrameError(None)
        label = bytes(rest[:num_label])
        if place == _INLINE:
            return label, rest[num_label:]
        if len(files) != 1:
            raise FrameError(label)
        return label, _Place(files[0], size, place)

    def _read(self, label: bytes, body: memoryview | _Place) -> Any:
        try:
            # A copy: the next packet overwrites this buffer, and arrays use the memory of their frame.
            return self._codec.decode(body.content() if isinstance(body, _Place) else bytearray(body))
        except Exception as error:
            # Includes MemoryError, OSError of a bad file, and errors that constructors raise.
            raise FrameError(label) from error

    def _allow(self, timeout_s: float | None) -> None:
        if self._end.gettimeout() != timeout_s:
            self._end.settimeout(timeout_s)

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()
        with self._keeping:
            self._max_kept = 0
            while self._kept:
                os.close(self._kept.pop())


def _files(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that arrived with a packet."""
    found = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _memory() -> int:
    """A new memory file; the caller closes it."""
    return os.memfd_create("beheld", os.MFD_CLOEXEC)


def _write(file: int, pieces: list[Buffer]) -> None:
    """Write the pieces at the file's position. The kernel copies without the interpreter lock."""
    for first in range(0, len(pieces), _MAX_PIECES):
        left = [memoryview(piece) for piece in pieces[first : first + _MAX_PIECES] if len(piece)]
        while left:
            done = os.writev(file, left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]


@dataclass(frozen=True)
class _Place:
    """The place of a body of `size` bytes in a memory file; `place` is _SHARED or _KEPT."""

    file: int
    size: int
    place: int

    def content(self) -> memoryview:
        """A copy of the body; the sender may overwrite a kept file afterwards.

        Mapping the file would save the copy. But it would occupy a descriptor as long as a cache holds the item, and
        the sender could still change the content.
        """
        if self.place == _SHARED:
            return _content(self.file, self.size, 0)
        try:
            return _content(self.file, self.size, _KEPT_HEAD)
        finally:
            os.pwrite(self.file, _READ, 0)


def _content(file: int, size: int, start: int) -> memoryview:
    import numpy as np

    if os.fstat(file).st_size < start + size:
        raise ValueError("the frame's memory file is too short")
    # Unlike a bytearray, it is not filled with zeros first.
    body = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        count = os.preadv(file, [body[done:]], start + done)
        if count == 0:
            raise ValueError("the frame's memory file is too short")
        done += count
    return body


def end_with(end: socket.socket, after_s: float = 0.0) -> None:
    """End this process as soon as the other side ends, or so much later, whatever this process is doing."""

    def watch() -> None:
        gone = select.poll()
        # Between hosts, the end of one side only shows as this event.
        gone.register(end, select.POLLRDHUP)
        gone.poll()
        time.sleep(after_s)
        # There is nothing to save and no one to answer to.
        os._exit(0)

    threading.Thread(target=watch, name="beheld-watch", daemon=True).start()
