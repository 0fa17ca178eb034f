"""A video as single JPEG images, which data URLs of the type video/jpeg hold one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError
from beheld.inputs.media import decode, header

# No file of another kind begins so.
_MARK = b"\0beheld:stills\0"
_LENGTH = 8


def joined(images: Sequence[bytes]) -> bytes:
    """The images as one run of bytes, each after its length."""
    return _MARK + b"".join(len(image).to_bytes(_LENGTH, "big") + image for image in images)


def are(data: bytes) -> bool:
    """Whether bytes are images that `joined` made one."""
    return data.startswith(_MARK)


def images_of(data: bytes) -> list[bytes]:
    """The images that were joined.

    Raises:
        DecodeError: the bytes end within one.
    """
    found, place = [], len(_MARK)
    while place < len(data):
        begin = place + _LENGTH
        place = begin + int.from_bytes(data[place:begin], "big")
        if place > len(data):
            raise DecodeError("A frame of the video is cut off.", "Send the complete data URL.")
        found.append(data[begin:place])
    return found


def size_of(images: Sequence[bytes], limits: MediaLimits) -> tuple[int, int]:
    """Width and height of the images, which their headers tell without decoding.

    Raises:
        DecodeError: one is no JPEG, or they have different sizes.
        LimitError: more pixels than allowed.
    """
    sizes = set()
    for number, image in enumerate(images, 1):
        decode.check_header(image, limits)
        size = header.size_of(image) if image[:3] == b"\xff\xd8\xff" else None
        if size is None:
            raise DecodeError(f"Frame {number} of the video is not a JPEG image.", "Encode each frame as JPEG.")
        sizes.add(size)
    if len(sizes) != 1:
        raise DecodeError(
            "The frames of the video have different sizes." if sizes else "The video has no frames.",
            "Send frames of one size.",
        )
    return sizes.pop()


def frames(images: Sequence[bytes], limits: MediaLimits) -> Iterator[Any]:
    """Yield the images, upright, as arrays (height, width, 3) of bytes.

    Raises:
        DecodeError: one is broken.
        LimitError: more pixels than allowed.
    """
    import numpy as np

    for image in images:
        yield np.asarray(decode.open_bytes(image, limits).image)
