"""Framed content digests of 32 bytes, which never collide for different meanings.

Every value is written as a tag, its length and its bytes, so that neither concatenation nor nesting makes two different
inputs look alike: ("ab", "c") and ("a", "bc"), 1 and True, a list and its only element all differ.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

_LENGTH = struct.Struct("<Q")
# Shorter values are buffered, because a call of the hash takes longer than hashing them.
_LONG = 4096


class Digest:
    """A digest in progress; `add` frames its argument."""

    def __init__(self, kind: str) -> None:
        self._hash = blake3()
        self._gathered = bytearray()
        self.add(kind)

    def add(self, value: Any) -> Digest:
        """Add None, a number, text, bytes, or a list, set or mapping of these.

        Raises:
            TypeError: the value has another type, which has no defined encoding.
        """
        if value is None:
            self._frame(b"n", b"")
        elif isinstance(value, bool):
            self._frame(b"b", b"\x01" if value else b"\x00")
        elif isinstance(value, int):
            self._frame(b"i", str(value).encode())
        elif isinstance(value, float):
            self._frame(b"f", struct.pack("<d", value))
        elif isinstance(value, str):
            self._frame(b"s", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._frame(b"y", value)
        elif isinstance(value, list | tuple):
            self._frame(b"l", _LENGTH.pack(len(value)))
            for entry in value:
                self.add(entry)
        elif isinstance(value, Mapping):
            self._frame(b"m", _LENGTH.pack(len(value)))
            for key in sorted(value, key=str):
                self.add(key).add(value[key])
        elif isinstance(value, frozenset | set):
            self._frame(b"u", _LENGTH.pack(len(value)))
            for entry in sorted(value, key=repr):
                self.add(entry)
        else:
            raise TypeError(f"a value of type {type(value).__name__} has no digest")
        return self

    def _frame(self, tag: bytes, payload: Any) -> None:
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        self._gathered += tag
        self._gathered += _LENGTH.pack(size)
        if size < _LONG:
            self._gathered += payload
        else:
            self._flush()
            self._hash.update(payload)

    def _flush(self) -> None:
        self._hash.update(self._gathered)
        self._gathered.clear()

    def done(self) -> bytes:
        """Return the 32 bytes."""
        self._flush()
        return self._hash.digest()


def salted(digest: bytes, salt: bytes) -> bytes:
    """Return the digest under which a caller's private items are stored; without a salt, the shared one."""
    return Digest("salted").add(salt).add(digest).done() if salt else digest


def of_name(uuid: str, modality: str) -> bytes:
    """Return the digest of the caller's name of an item."""
    return Digest("name").add(modality).add(uuid).done()


def of_bytes(data: bytes, what: str) -> bytes:
    """Return the digest of undecoded bytes; `what` describes how they would be decoded."""
    return Digest("bytes").add(what).add(data).done()


def of_page(document: bytes, page: list[Any]) -> bytes:
    """Return the digest of an undecoded page, of its document's digest and of what tells the page from others."""
    return Digest("page").add(document).add(page).done()


def of_rgb(width: int, height: int, rgbx: Any) -> bytes:
    """Return the digest of an image's pixels: rows of 8-bit RGB, top to bottom, a byte of 255 after each pixel."""
    return Digest("rgbx").add(width).add(height).add(rgbx).done()


def of_image(image: Any) -> bytes:
    """Return the digest of a PIL image of any mode, with everything that determines its RGB form."""
    palette = image.palette
    key = Digest("PIL image").add(image.mode).add(list(image.size))
    key.add(None if palette is None else [palette.mode, bytes(palette.palette)])
    key.add(_plain(image.info.get("transparency"))).add(int(image.getexif().get(0x0112, 1) or 1))
    return key.add(image.tobytes()).done()


def of_array(kind: str, array: Any, extra: Any = None) -> bytes:
    """Return the digest of a numpy array: type, shape, bytes, and related values."""
    import numpy as np

    flat = np.ascontiguousarray(array)
    key = Digest(kind).add(flat.dtype.str).add(list(flat.shape)).add(extra)
    return key.add(flat.data.cast("B") if flat.size else b"").done()


def of_item(content: bytes, modality: str, identity: bytes, options: Mapping[str, Any], setting: str) -> bytes:
    """Return the digest of a processed item: its content and everything that determines its features.

    Args:
        content: digest of the content.
        modality: "image", "video" or "audio".
        identity: digest of the processor and its settings.
        options: the options of this call.
        setting: the setting in the prompt that changes the features ("alone", "among others"), or "".
    """
    return Digest("item").add(content).add(modality).add(identity).add(options).add(setting).done()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
