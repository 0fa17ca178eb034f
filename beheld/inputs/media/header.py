"""Reads an image's size, and how often its file goes over it, so that what costs too much is refused cheaply."""

from __future__ import annotations

import re
import struct

# A file may hold any number of segments before its size; beyond this many, the decoder decides.
_MAX_SEGMENTS = 4096
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset((0x01, *range(0xD0, 0xD8)))
# A marker that ends the compressed data of a JPEG scan.
_AFTER_SCAN = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")


_PDF_REACH = 1024
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_pdf(data: bytes) -> bool:
    """Return whether bytes begin like a PDF; readers look for its mark within the first kilobyte."""
    return b"%PDF-" in data[:_PDF_REACH]


def is_tiff(data: bytes) -> bool:
    """Return whether bytes begin like a TIFF."""
    return data[:4] in _TIFF


_HEIF = frozenset((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"))
# How formats begin that are recognized by this alone.
_MARKS: dict[str, bytes | tuple[bytes, ...]] = {
    "TIFF": _TIFF,
    "ICO": b"\0\0\1\0",
    "PPM": tuple(b"P" + bytes((kind, after)) for kind in b"123456" for after in b" \t\r\n"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\0\0\0\x0cJXL \r\n", b"\xff\x0a"),
}
_TEXT_REACH = 1024
_PNG = b"\x89PNG\r\n\x1a\n"
# The most icons that a file may list; each states a size of at most 256 pixels a side.
_MAX_ICONS = 256


def is_heif(data: bytes) -> bool:
    """Return whether bytes begin like HEIC or another HEIF, whose brand is not AVIF's."""
    return data[4:8] == b"ftyp" and data[8:12] in _HEIF


def format_of(data: bytes) -> str | None:
    """Return the name of a format that is not among the usual ones of images; None if the bytes begin otherwise."""
    if is_heif(data):
        return "HEIC"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"avis"):
        return "AVIF"
    for name, marks in _MARKS.items():
        if data.startswith(marks):
            return name
    text = data[:_TEXT_REACH].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<svg") or (text.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text):
        return "SVG"
    return "HTML" if text.startswith((b"<!doctype html", b"<html")) else None


def largest_icon(data: bytes) -> tuple[bytes, tuple[int, int]] | None:
    """Return the largest image of a file of icons, and the size that its own bytes state; None if there is none."""
    try:
        reserved, kind, count = struct.unpack_from("<HHH", data, 0)
        if (reserved, kind) != (0, 1) or not 0 < count <= _MAX_ICONS:
            return None
        entries = []
        for number in range(count):
            width, height = data[6 + 16 * number], data[7 + 16 * number]
            size, offset = struct.unpack_from("<II", data, 14 + 16 * number)
            entries.append(((width or 256) * (height or 256), data[offset : offset + size]))
        _, image = max(entries, key=lambda entry: entry[0])
        if image[:8] == _PNG:
            return image, _pair(">II", image, 16)
        width, height = _pair("<ii", image, 4)
        # Its rows are followed by those of a mask.
        return image, (abs(width), abs(height) // 2)
    except (struct.error, IndexError):
        return None


def icon_of(image: bytes, size: tuple[int, int]) -> bytes:
    """Return a file of icons that holds only this image, a bitmap.

    Raises:
        struct.error: the image is too short to be one.
    """
    width, height = (side if side < 256 else 0 for side in size)
    (depth,) = struct.unpack_from("<H", image, 14)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, width, height, 0, 0, 1, depth, len(image), 22) + image


def is_png(data: bytes) -> bool:
    """Return whether bytes begin like a PNG."""
    return data[:8] == _PNG


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the header's width and height in pixels; None if not found.

    It reads PNG, JPEG, GIF, BMP, WebP and ICO. The decoder checks again before it decodes.
    """
    try:
        if is_png(data):
            return _pair(">II", data, 16)
        if data[:3] == b"GIF":
            return _pair("<HH", data, 6)
        if data[:2] == b"BM":
            return _bmp(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp(data)
        if data[:2] == b"\xff\xd8":
            return _jpeg(data)
        icon = largest_icon(data)
        if icon is not None:
            return icon[1]
    except (struct.error, IndexError):
        return None
    return None


def _pair(form: str, data: bytes, offset: int) -> tuple[int, int]:
    width, height = struct.unpack_from(form, data, offset)
    return width, height


def _bmp(data: bytes) -> tuple[int, int]:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        return _pair("<HH", data, 18)
    width, height = _pair("<ii", data, 18)
    # Rows from top to bottom have a negative height.
    return abs(width), abs(height)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = _pair("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Return the first frame header, after the segments before it."""
    place = 2
    for _ in range(_MAX_SEGMENTS):
        marker = data.find(b"\xff", place)
        if marker < 0:
            return None
        kind = data[marker + 1]
        if kind in _FRAMES:
            height, width = _pair(">HH", data, marker + 5)
            return width, height
        if kind in (0x00, 0xFF, *_BARE):
            place = marker + (1 if kind == 0xFF else 2)
            continue
        if kind in (0xD9, 0xDA):
            return None
        (length,) = struct.unpack_from(">H", data, marker + 2)
        place = marker + 2 + length
    return None


def scans_of(data: bytes) -> int:
    """Return how often decoding goes over all pixels: once, or for each scan of a JPEG.

    A scan may take 26 bytes and still cost as much time as the pixels take. Damaged files count as far as they can be
    read; with very many segments, each counts as a scan.
    """
    if data[:2] != b"\xff\xd8":
        return 1
    place, scans, segments = 2, 0, 0
    while (found := _AFTER_SCAN.search(data, place)) is not None:
        segments += 1
        kind = data[found.start() + 1]
        if kind == 0xD9 or found.end() + 2 > len(data):
            break
        scans += kind == 0xDA
        # Of a scan's segment too, only the header has a length; its data end at the next marker.
        place = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
    return max(1, scans, segments - _MAX_SEGMENTS)
