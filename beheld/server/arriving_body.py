"""A request's body in memory that grows without being moved."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

# Beyond this, a growing bytearray is moved again and again; moving 60 MB keeps all threads waiting for 100 ms and more.
_MAX_MOVED = 1 << 20


class ArrivingBody:
    """Collects a body as it arrives.

    A large one has mapped pages of its own. Pages that no byte has reached take no memory, and growing moves none.

    Args:
        declared: bytes that the client says it will send; 0 if it does not say.
    """

    def __init__(self, declared: int = 0) -> None:
        self._content: bytearray | mmap = bytearray()
        self._size = 0
        self._declared = declared

    def __len__(self) -> int:
        return self._size

    def append(self, chunk: bytes) -> None:
        """Add what came."""
        end = self._size + len(chunk)
        content = self._content
        if isinstance(content, bytearray):
            if end <= _MAX_MOVED:
                content += chunk
                self._size = end
                return
            self._content = pages = _pages(max(self._declared, 2 * end))
            pages[: self._size] = bytes(content)
            content = pages
        elif end > len(content):
            content.resize(2 * end)
        content[self._size : end] = chunk
        self._size = end

    def whole(self) -> bytearray | mmap:
        """All that came; nothing may be added afterwards."""
        if isinstance(self._content, mmap) and len(self._content) != self._size:
            self._content.resize(self._size)
        return self._content


def _pages(size: int) -> mmap:
    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
