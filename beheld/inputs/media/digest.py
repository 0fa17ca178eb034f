"""Framed content digests: whole 32 bytes that two different meanings never share.

Every value is written as a tag, its length and its bytes, so that neither concatenation nor nesting can make two
different inputs look alike: ("ab", "c") and ("a", "bc"), 1 and True, a list and its only element all differ.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

_LENGTH = struct.Struct("<Q")
# What is shorter is gathered: each call of the hash takes longer than its bytes.
_LONG = 4096


class Digest:
    """A digest in the making; `add` frames what it is given."""

    def __init__(self, kind: str) -> None:
        self._hash = blake3()
        self._gathered = bytearray()
        self.add(kind)

    def add(self, value: Any) -> Digest:
        """Take in None, a number, text, bytes, or a list, set or mapping of these.

        Raises:
            TypeError: the value is of another type, which has no agreed bytes.
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
        elif isinstance(value, Mapping):
            self._frame(b"m", _LENGTH.pack(len(value)))
            for key in sorted(value, key=str):
                self.add(key).add(value[key])
        elif isinstance(value, list | tuple):
            self._frame(b"l", _LENGTH.pack(len(value)))
            for entry in value:
                self.add(entry)
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
        """The 32 bytes."""
        self._flush()
        return self._hash.digest()


def salted(digest: bytes, salt: bytes) -> bytes:
    """The digest under which a caller's own things are kept; without a salt, the one that all share."""
    return Digest("salted").add(salt).add(digest).done() if salt else digest


def of_bytes(data: bytes, what: str) -> bytes:
    """Digest of undecoded bytes; `what` says how they would be decoded."""
    return Digest("bytes").add(what).add(data).done()


def of_rgb(width: int, height: int, rgbx: Any) -> bytes:
    """Digest of an image as the model sees it: rows of 8-bit RGB, top to bottom, a byte of 255 after each pixel."""
    return Digest("rgbx").add(width).add(height).add(rgbx).done()


def of_image(image: Any) -> bytes:
    """Digest of a PIL image of any mode, with all that decides what becomes of it as RGB."""
    palette = image.palette
    key = Digest("PIL image").add(image.mode).add(list(image.size))
    key.add(None if palette is None else [palette.mode, bytes(palette.palette)])
    key.add(_plain(image.info.get("transparency"))).add(int(image.getexif().get(0x0112, 1) or 1))
    return key.add(image.tobytes()).done()


def of_array(kind: str, array: Any, extra: Any = None) -> bytes:
    """Digest of a numpy array: type, shape, bytes, and what else belongs to it."""
    import numpy as np

    flat = np.ascontiguousarray(array)
    key = Digest(kind).add(flat.dtype.str).add(list(flat.shape)).add(extra)
    return key.add(flat.data.cast("B") if flat.size else b"").done()


def of_item(content: bytes, modality: str, identity: bytes, options: Mapping[str, Any], setting: str) -> bytes:
    """Digest of a processed item: the content and everything that decides its features.

    Args:
        content: digest of the content.
        modality: "image", "video" or "audio".
        identity: digest of the processor and its settings.
        options: the options of this call.
        setting: what of its surroundings changes the features ("alone", "among others"), or "".
    """
    return Digest("item").add(content).add(modality).add(identity).add(options).add(setting).done()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
