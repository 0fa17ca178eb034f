"""Fetching and converting media as scripts do it themselves, through the engine's own guarded fetcher and decoders."""

from __future__ import annotations

from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError, ParamsError
from beheld.inputs.fetch.fetch import FetchRules, fetch
from beheld.inputs.fetch.pinned_http import parse
from beheld.inputs.fetch.url_mirror import places
from beheld.inputs.media import audio, decode, video
from beheld.utils import env

_LIMITS = MediaLimits()


def fetch_image(image_url: str, *, image_mode: str = "RGB") -> Any:
    """The PIL picture behind an http(s) or data URL, upright and in RGB unless another mode is asked for.

    Raises:
        MediaError: it may not or cannot be fetched, or is not a picture.
    """
    picture = decode.open_bytes(_bytes(image_url, "image"), _LIMITS).image
    return picture if image_mode == "RGB" else convert_image_mode(picture, image_mode)


def fetch_video(video_url: str, *, num_frames: int | None = None, fps: float | None = None) -> tuple[Any, dict]:
    """The frames (frames, height, width, 3) of a video behind a URL, and what is known of their times.

    The pair can be given to `generate` as an item of "video".

    Raises:
        MediaError: it may not or cannot be fetched, or is not a video.
        ParamsError: num_frames or fps is out of range.
    """
    options = {name: value for name, value in (("num_frames", num_frames), ("fps", fps)) if value is not None}
    return frames_and_metadata(video.open_bytes(_bytes(video_url, "video"), video.Sampling.of(options), _LIMITS))


def fetch_audio(audio_url: str) -> tuple[Any, int]:
    """The samples (mono, float32) of a sound behind a URL, and their rate in Hz.

    Raises:
        MediaError: it may not or cannot be fetched, or is not a sound.
    """
    wave = audio.open_bytes(_bytes(audio_url, "audio"), _LIMITS)
    return wave.samples, wave.rate


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """A PIL picture in another mode; transparency is laid on white, and 16-bit grey is scaled, on the way to RGB.

    Raises:
        ParamsError: PIL knows no such mode, or no way to it.
    """
    if image.mode == to_mode:
        return image
    if to_mode == "RGB":
        return decode.to_rgb(image, [])
    try:
        return image.convert(to_mode)
    except ValueError as error:
        raise ParamsError(f"A picture cannot become {to_mode!r}: {error}.", param="to_mode") from error


def frames_and_metadata(clip: video.Clip) -> tuple[Any, dict]:
    """A clip as `generate` takes it: its frames, and their times as far as they are known."""
    told = {
        "total_num_frames": clip.total,
        "fps": clip.fps,
        "duration": clip.total / clip.fps if clip.fps else None,
        "frames_indices": list(range(len(clip.frames)) if clip.indices is None else clip.indices),
    }
    return clip.frames, told


def _bytes(url: str, modality: str) -> bytes:
    try:
        return fetch(url, modality, FetchRules(limits=_LIMITS)).data
    except FetchError as error:
        if not url.lower().startswith(("http://", "https://")):
            raise
        raise FetchError(
            f"{url}: {error.reason}", _remedy(url, error), stage=error.stage, detail=error.detail
        ) from error


def _remedy(url: str, error: FetchError) -> str:
    """What to do about an address that cannot be fetched: also where to lay its file by hand."""
    try:
        (place, *_) = places(parse(url)) or ("",)
    except FetchError:
        return error.remedy
    folder = env.MEDIA_CACHE() or "a folder that BEHELD_MEDIA_CACHE names"
    return f"{error.remedy} Without a network, lay the file at {place!r} below {folder}.".strip()
