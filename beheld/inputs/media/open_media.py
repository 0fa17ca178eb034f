"""From what came in to what a processor takes: bytes, arrays and images become RGB images, clips and waveforms.

This is the part of an item's preparation that reads what strangers made, and it runs in a worker's process wherever
there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.inputs.media import audio, decode, video
from beheld.inputs.media.cache import Content
from beheld.inputs.media.pixels import Pixels, digest_of


@dataclass(frozen=True, eq=False)
class Source:
    """What came in.

    Attributes:
        kind: in a word: "bytes", "url", "path", "array", "PIL", "frames".
        digest: of the undecoded bytes, or of the content where that came decoded.
        payload: the bytes, or the decoded content.
        sampling: which frames to take of a video's bytes.
        content: of a payload that is open already, as `open_source` gives it: what is to be remembered of it.
        borrowed: the payload is the caller's own image; see `taken`.
    """

    kind: str
    digest: bytes
    payload: Any
    sampling: video.FrameSampling | None = None
    content: Content | None = None
    borrowed: bool = False


def open_source(modality: str, source: Source, limits: MediaLimits, rate: Callable[[], int]) -> tuple[Any, Content]:
    """The decoded content (Pixels, a Clip or a Waveform), and what is to be remembered of it.

    Args:
        modality: "image", "video" or "audio".
        source: what came in.
        limits: bounds.
        rate: the sampling rate in Hz that the audio processor wants; asked for only where there is audio.

    Raises:
        DecodeError, LimitError: the content is at fault.
    """
    payload = source.payload
    if source.content is not None:
        return payload, source.content
    if modality == "image":
        return _open_image(payload, limits)
    if modality == "video":
        clip = payload
        if isinstance(payload, bytes):
            assert source.sampling is not None
            clip = video.open_bytes(payload, source.sampling, limits)
        return clip, Content(source.digest, clip.given, clip.lost)
    encoded = isinstance(payload, bytes)
    wave = audio.open_bytes(payload, limits, rate()) if encoded else audio.resampled(payload, rate())
    return wave, Content(source.digest, wave.given, wave.lost)


def _open_image(payload: Any, limits: MediaLimits) -> tuple[Pixels, Content]:
    if decode.is_image(payload):
        with decode.alone_with(payload):
            decoded = decode.from_pil(payload, limits, getattr(payload, "format", None))
            # That may be the same one.
            pixels = Pixels.of(decoded.image)
    else:
        encoded = isinstance(payload, bytes)
        decoded = decode.open_bytes(payload, limits) if encoded else decode.from_array(payload, limits)
        pixels = Pixels.of(decoded.image)
    return pixels, Content(pixels.digest(), {**decoded.given, **decoded.treated}, decoded.lost)


def plain_rgb(image: Any) -> Source:
    """The source of a loaded PIL image that is already what the model sees: see decode.is_plain_rgb.

    To find one that is known, its pixels are read where they lie: copying them takes as long again, and several times
    as long where that needs new pages.
    """
    key = digest_of(image)
    return _copied(image) if key is None else Source("PIL", key, image, borrowed=True)


def taken(source: Source) -> Source:
    """A borrowed source with a copy of its own, and the digest of that: the image may have changed meanwhile."""
    assert source.borrowed
    return _copied(source.payload)


def _copied(image: Any) -> Source:
    pixels = Pixels.of(image)
    key = pixels.digest()
    given = decode.described(image, getattr(image, "format", None))
    return Source("PIL", key, pixels, content=Content(key, given, ()))


def unpacked(opened: Any) -> Any:
    """Decoded content as processors take it: pixels become a PIL image."""
    return opened.image() if isinstance(opened, Pixels) else opened
