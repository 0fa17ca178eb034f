"""Decoded images in Pillow's memory layout, four bytes per pixel.

Pillow's exports (`tobytes`, numpy's view of an image) repack them to three bytes per pixel and hold the GIL meanwhile,
6 ms for 1920 x 1080 pixels. Here its memory is read in place, and copying and hashing release the GIL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from beheld.inputs.media import digest
from beheld.utils.version import numbers_of

# Pillow keeps images from 16 MiB on in several blocks; these are copied in steps of this size.
_STRIP_BYTES = 8 << 20
# Pillow's filter that picks pixels without interpolation.
_NEAREST = 0


class _ArrowSchema(ctypes.Structure):
    """The head of a schema, from the Arrow C data interface (arrow.apache.org/docs/format/CDataInterface.html)."""

    _fields_ = [("format", ctypes.c_char_p)]


class _ArrowArray(ctypes.Structure):
    """The head of an array, from the Arrow C data interface."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]

_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100


@dataclass(frozen=True, eq=False)
class Pixels:
    """A copy of an image in RGB.

    Attributes:
        width, height: in pixels.
        rgbx: (height * width * 4,) bytes: rows from top to bottom; every fourth byte is 255.
    """

    width: int
    height: int
    rgbx: Any

    @classmethod
    def of(cls, image: Any) -> Pixels:
        """Copy a loaded PIL image in mode RGB."""
        import numpy as np

        width, height = image.size
        rgbx = _copied(image)
        if rgbx is None:
            rgbx = np.empty((height, 4 * width), np.uint8)
            rows = max(1, _STRIP_BYTES // (4 * width))
            for top in range(0, height, rows):
                bottom = min(height, top + rows)
                # Any other way of cutting it out triggers Pillow's limit on images that it opens.
                strip = image.resize((width, bottom - top), _NEAREST, box=(0, top, width, bottom))
                copied = _copied(strip)
                if copied is None:
                    copied = _opaque(strip.tobytes("raw", "RGBX"))
                rgbx[top:bottom] = copied.reshape(-1, 4 * width)
            rgbx = rgbx.reshape(-1)
        return cls(width, height, rgbx)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copy."""
        return int(self.rgbx.nbytes)

    def digest(self) -> bytes:
        """Return the digest, see digest.of_rgb."""
        return digest.of_rgb(self.width, self.height, self.rgbx.data)

    def image(self) -> Any:
        """Return the pixels as a PIL image."""
        from PIL import Image

        return Image.frombytes("RGB", (self.width, self.height), self.rgbx, "raw", "RGBX")


def digest_of(image: Any) -> bytes | None:
    """Return the digest of `Pixels.of(image)` without a copy; None if Pillow does not lend the image's memory.

    It differs from every copy's digest if Pillow has a value other than 255 between pixels, which does not happen for
    images from files or arrays.
    """
    lent = _lent(image)
    if lent is None:
        return None
    memory, _owners = lent
    return digest.of_rgb(image.width, image.height, memory)


def _copied(image: Any) -> Any:
    """Return a copy of an image's memory; None if Pillow does not lend it."""
    lent = _lent(image)
    if lent is None:
        return None
    memory, _owners = lent
    return _opaque(memory)


def _lent(image: Any) -> tuple[memoryview, Any] | None:
    """Return an image's memory and its owners; None if Pillow is old or has several blocks.

    The owners must be kept alive while the memory is read.
    """
    from PIL import Image

    # Pillow's types do not declare it. Before Pillow 13, rows with gaps are lent as if they had none.
    core: Any = vars(Image)["core"]
    if not _lends() or core.get_alignment() > 1:
        return None
    try:
        owners = image.__arrow_c_array__()
    except ValueError:
        return None
    kind = _ArrowSchema.from_address(_pointer_of(owners[0], b"arrow_schema"))
    whole = _ArrowArray.from_address(_pointer_of(owners[1], b"arrow_array"))
    num_bytes = 4 * image.width * image.height
    if kind.format != b"+w:4" or (whole.offset, whole.n_children) != (0, 1):
        return None
    flat = whole.children[0].contents
    if (flat.length, flat.offset, flat.n_buffers) != (num_bytes, 0, 2):
        return None
    return _memory_at(flat.buffers[1], num_bytes, _READ_ONLY), owners


@cache
def _lends() -> bool:
    """Pillow 11.2 also lends memory, but never frees what it has lent."""
    import PIL

    return numbers_of(PIL.__version__) >= (11, 3)


def _opaque(rgbx: Any) -> Any:
    """Return a copy with 255 in every fourth byte, whose value in Pillow depends on how the image was made."""
    import numpy as np

    # One call: each call that releases the GIL waits to get it back.
    return np.bitwise_or(np.frombuffer(rgbx, "<u4"), np.uint32(0xFF000000)).view(np.uint8)
