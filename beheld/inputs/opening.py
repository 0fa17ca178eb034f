"""From what came in to what a processor takes: bytes, arrays and pictures become RGB pictures, clips and waveforms.

This is the part of an item's preparation that reads what strangers made, and it runs in a worker's process wherever
there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.inputs import audio, decode, digest, video
from beheld.inputs.cache import Content


@dataclass(frozen=True, eq=False)
class Source:
    """What came in.

    Attributes:
        kind: in a word: "bytes", "url", "path", "array", "PIL", "frames".
        digest: of the undecoded bytes, or of the content where that came decoded.
        payload: the bytes, or the decoded content.
        sampling: which frames to take of a video's bytes.
        pixels: of a picture that came decoded and is what the model sees, as `packed` gives it: its digest was made of
            them, and they need not be copied out of it again.
    """

    kind: str
    digest: bytes
    payload: Any
    sampling: video.Sampling | None = None
    pixels: Any = None


def open_source(modality: str, source: Source, limits: MediaLimits, rate: Callable[[], int]) -> tuple[Any, Content]:
    """The decoded content (a PIL picture, a Clip or a Waveform), and what is to be remembered of it.

    Args:
        modality: "image", "video" or "audio".
        source: what came in.
        limits: bounds.
        rate: the sampling rate in Hz that the processor of sounds wants; asked for only where there is a sound.

    Raises:
        DecodeError, LimitError: the content is at fault.
    """
    payload = source.payload
    if modality == "image":
        return _open_image(source, limits)
    if modality == "video":
        clip = payload
        if isinstance(payload, bytes):
            assert source.sampling is not None
            clip = video.open_bytes(payload, source.sampling, limits)
        return clip, Content(source.digest, clip.given, clip.lost)
    encoded = isinstance(payload, bytes)
    wave = audio.open_bytes(payload, limits, rate()) if encoded else audio.resampled(payload, rate())
    return wave, Content(source.digest, wave.given, wave.lost)


def _open_image(source: Source, limits: MediaLimits) -> tuple[Any, Content]:
    payload = source.payload
    if isinstance(payload, bytes):
        picture = decode.open_bytes(payload, limits)
    elif decode.is_picture(payload):
        picture = decode.from_pil(payload, limits, getattr(payload, "format", None))
    else:
        picture = decode.from_array(payload, limits)
    rgb = picture.image
    key = source.digest
    if rgb is not payload:
        key = digest.of_rgb(rgb.width, rgb.height, rgb.tobytes())
    return rgb, Content(key, {**picture.given, **picture.treated}, picture.lost)


def packed(opened: Any) -> Any:
    """Decoded content as it crosses to another process: a picture as an array (height, width, 3) of bytes."""
    import numpy as np

    return np.asarray(opened) if decode.is_picture(opened) else opened


def unpacked(crossed: Any) -> Any:
    """Decoded content from `packed`."""
    if not decode.is_array(crossed):
        return crossed
    from PIL import Image

    return Image.fromarray(crossed)
