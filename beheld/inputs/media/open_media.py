"""Converts bytes, arrays and images to what processors take: RGB images, clips and waveforms.

This step reads untrusted data, so it runs in a worker's process if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.inputs.media import audio, decode, document, video
from beheld.inputs.media.cache import Content
from beheld.inputs.media.pixels import Pixels, digest_of


@dataclass(frozen=True, eq=False)
class Source:
    """An unopened or open media source.

    Attributes:
        kind: "bytes", "url", "path", "array", "PIL" or "frames".
        digest: of the undecoded bytes, or of decoded content.
        payload: the bytes, or the decoded content.
        sampling: which frames of a video's bytes to sample.
        content: for an open payload, as from `open_source`: the facts to cache.
        borrowed: whether the payload is the caller's image; see `taken`.
        page: which page of the bytes, a document, is the image; None if they are an image themselves.
        background: the colour behind what is transparent in an image.
    """

    kind: str
    digest: bytes
    payload: Any
    sampling: video.FrameSampling | None = None
    content: Content | None = None
    borrowed: bool = False
    page: document.PageChoice | None = None
    background: decode.Colour = decode.WHITE


def open_source(modality: str, source: Source, limits: MediaLimits, rate: Callable[[], int]) -> tuple[Any, Content]:
    """Return the decoded content (Pixels, a Clip or a Waveform), and the facts to cache.

    Args:
        modality: "image", "video" or "audio".
        source: the media source.
        limits: on sizes.
        rate: returns the audio processor's sampling rate in Hz; called only for audio.

    Raises:
        DecodeError, LimitError: the content is at fault.
    """
    payload = source.payload
    if source.content is not None:
        return payload, source.content
    if modality == "image":
        return _open_image(payload, limits, source.page, source.background)
    if modality == "video":
        clip = payload
        if isinstance(payload, bytes):
            assert source.sampling is not None
            clip = video.open_bytes(payload, source.sampling, limits)
        return clip, Content(source.digest, clip.given, clip.lost)
    encoded = isinstance(payload, bytes)
    wave = audio.open_bytes(payload, limits, rate()) if encoded else audio.resampled(payload, rate())
    return wave, Content(source.digest, wave.given, wave.lost)


def _open_image(
    payload: Any, limits: MediaLimits, page: document.PageChoice | None, background: decode.Colour
) -> tuple[Pixels, Content]:
    if page is not None:
        decoded = document.page_image(payload, page, limits)
        pixels = Pixels.of(decoded.image)
    elif decode.is_image(payload):
        with decode.alone_with(payload):
            decoded = decode.from_pil(payload, limits, getattr(payload, "format", None), background)
            # The two may be the same image.
            pixels = Pixels.of(decoded.image)
    else:
        encoded = isinstance(payload, bytes)
        open_ = decode.open_bytes if encoded else decode.from_array
        decoded = open_(payload, limits, background)
        pixels = Pixels.of(decoded.image)
    return pixels, Content(pixels.digest(), {**decoded.given, **decoded.treated}, decoded.lost)


def plain_rgb(image: Any) -> Source:
    """Return the source of a loaded PIL image that already is what the model sees: see decode.is_plain_rgb.

    Its pixels are hashed in place to find a known image: copying takes as long again, and several times as long if it
    needs new pages.
    """
    key = digest_of(image)
    return _copied(image) if key is None else Source("PIL", key, image, borrowed=True)


def taken(source: Source) -> Source:
    """Return a borrowed source with its own copy and that copy's digest: the image may have changed meanwhile."""
    assert source.borrowed
    return _copied(source.payload)


def _copied(image: Any) -> Source:
    pixels = Pixels.of(image)
    key = pixels.digest()
    given = decode.described(image, getattr(image, "format", None))
    return Source("PIL", key, pixels, content=Content(key, given, ()))


def unpacked(opened: Any) -> Any:
    """Return decoded content as processors take it: pixels become a PIL image."""
    return opened.image() if isinstance(opened, Pixels) else opened
