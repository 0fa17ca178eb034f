"""Reads animated images (GIF, WebP, PNG): their frames and when each is shown."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, first_line
from beheld.inputs.media import decode

_FORMATS = ("GIF", "WEBP", "PNG")
# A PNG says in its header how many frames it has; each costs a read to find out whether it has them.
_MAX_FRAMES = 100_000
# A frame that names no time, or none that can be seen, is shown as long as browsers show it.
_SHORTEST_MS, _USUAL_MS = 11, 100


@dataclass(frozen=True)
class Timeline:
    """When the frames of an animated image are shown.

    Attributes:
        size: (width, height) in pixels.
        form: the file's format.
        starts_ms: the time of each frame.
        total_ms: when the last one ends.
    """

    size: tuple[int, int]
    form: str
    starts_ms: tuple[int, ...]
    total_ms: int

    def fine_rate(self) -> tuple[float, tuple[int, ...], int]:
        """Return frames per second at which all frames begin at whole numbers, these numbers, and that of the end."""
        unit = math.gcd(self.total_ms, *self.starts_ms)
        return 1000 / unit, tuple(start // unit for start in self.starts_ms), self.total_ms // unit


def may_be(data: bytes) -> bool:
    """Return whether bytes begin like an image that may have several frames."""
    if data[:3] == b"GIF":
        return True
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        # The extended header has a bit for animations.
        return data[12:16] == b"VP8X" and len(data) > 20 and bool(data[20] & 0x02)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        head = data.find(b"acTL", 8)
        return 0 <= head < (len(data) if (pixels := data.find(b"IDAT", 8)) < 0 else pixels)
    return False


def timeline(data: bytes, limits: MediaLimits) -> Timeline | None:
    """Return when each frame is shown; None for a single frame.

    Raises:
        DecodeError: it is broken.
        LimitError: too many frames or pixels.
    """
    with _opened(data, limits) as image:
        if _count(image) < 2:
            # FFmpeg, which reads it then, shows what there is of a frame that was cut off.
            _at(image, 0)
            return None
        durations: list[int] = []
        while len(durations) < _count(image):
            # Some formats tell a frame's time only with its pixels.
            if not _at(image, len(durations)):
                break
            durations.append(_duration(image))
    starts = [0]
    for length in durations:
        starts.append(starts[-1] + length)
    return Timeline(image.size, str(image.format), tuple(starts[:-1]), starts[-1])


def frame(data: bytes, index: int, limits: MediaLimits) -> tuple[Any, str]:
    """Return one frame as an image, and the file's format.

    Raises:
        DecodeError: it is broken, or there is no such frame.
        LimitError: too many pixels.
    """
    with _opened(data, limits) as image:
        if not _at(image, index):
            raise DecodeError(f"Frame {index + 1} of the animated image is missing.", "Send the complete file.")
        return image.copy(), str(image.format)


def frames(data: bytes, indices: Sequence[int], limits: MediaLimits) -> Iterator[Any]:
    """Yield the frames at `indices` (ascending) as arrays (height, width, 3) of bytes.

    Raises:
        DecodeError: it is broken.
        LimitError: too many pixels.
    """
    import numpy as np

    with _opened(data, limits) as image:
        for index in indices:
            if not _at(image, index):
                return
            yield np.asarray(decode.to_rgb(image.copy(), []))


def _opened(data: bytes, limits: MediaLimits) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise LimitError("The animated image has too many pixels.", "Shrink it first.") from error
    except Exception as error:
        raise _broken(error) from error
    decode.check_size(*image.size, limits, len(data))
    if _count(image) > _MAX_FRAMES:
        raise LimitError(f"The animated image has {_count(image)} frames; the limit is {_MAX_FRAMES}.", "Cut it first.")
    work = _count(image) * image.width * image.height
    if work > limits.max_video_pixels:
        raise LimitError(
            f"Of the animated image, {work} pixels would be decoded; the limit is {limits.max_video_pixels}.",
            "Cut or shrink it first.",
        )
    return image


def _count(image: Any) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception as error:
        raise _broken(error) from error


def _at(image: Any, index: int) -> bool:
    """Decode a frame; False if the file ends before it."""
    try:
        image.seek(index)
        image.load()
    except EOFError:
        return False
    except MemoryError:
        raise
    except Exception as error:
        # On broken bytes Pillow raises exceptions of any kind.
        raise _broken(error) from error
    return True


def _duration(image: Any) -> int:
    given = image.info.get("duration", 0)
    milliseconds = round(given) if isinstance(given, int | float) and math.isfinite(given) else 0
    return milliseconds if milliseconds >= _SHORTEST_MS else _USUAL_MS


def _broken(error: Exception) -> DecodeError:
    return DecodeError("The animated image is broken.", "Send the complete file.", detail=first_line(error))
