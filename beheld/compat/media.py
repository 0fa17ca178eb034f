"""vLLM's helpers that fetch and convert media, built on the engine's guarded fetcher and decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import FetchError, ParamsError
from beheld.inputs.fetch.fetch import FetchRules, fetch
from beheld.inputs.fetch.pinned_http import parse
from beheld.inputs.fetch.url_mirror import places
from beheld.inputs.media import audio, decode, video
from beheld.utils import env

_LIMITS = MediaLimits(image_formats="all")
_RULES = FetchRules(limits=_LIMITS)


def fetch_image(image_url: str, *, image_mode: str = "RGB", rules: FetchRules = _RULES) -> Any:
    """Fetch an image from an http(s) or data URL; the result is a PIL image, upright, in RGB unless a mode is given.

    Raises:
        MediaError: the URL is forbidden or unreachable, or its content is not an image.
    """
    image = decode.open_bytes(_bytes(image_url, "image", rules), _LIMITS).image
    return image if image_mode == "RGB" else convert_image_mode(image, image_mode)


def fetch_video(
    video_url: str, *, num_frames: int | None = None, fps: float | None = None, rules: FetchRules = _RULES
) -> tuple[Any, dict]:
    """Fetch a video from a URL; return its frames (frames, height, width, 3) and their timing metadata.

    The pair is a valid "video" item for `generate`.

    Raises:
        MediaError: the URL is forbidden or unreachable, or its content is not a video.
        ParamsError: num_frames or fps is out of range.
    """
    options = {name: value for name, value in (("num_frames", num_frames), ("fps", fps)) if value is not None}
    data = _bytes(video_url, "video", rules)
    return frames_and_metadata(video.open_bytes(data, video.FrameSampling.of(options), _LIMITS))


def fetch_audio(audio_url: str, *, rules: FetchRules = _RULES) -> tuple[Any, int]:
    """Fetch audio from a URL; return the samples (mono, float32) and their rate in Hz.

    Raises:
        MediaError: the URL is forbidden or unreachable, or its content is not audio.
    """
    wave = audio.open_bytes(_bytes(audio_url, "audio", rules), _LIMITS)
    return wave.samples, wave.rate


def load_audio(path: Any, *, sr: float | None = 22050, mono: bool = True) -> tuple[Any, int]:
    """Read an audio file, by its path or open for reading bytes.

    Returns the samples (float32) at `sr` Hz, or at the file's rate, and that rate.

    Raises:
        MediaError: the file is not audio.
        ParamsError: several channels are asked for.
    """
    if not mono:
        raise ParamsError("Audio is read as one channel.", "Leave mono out.", param="mono")
    data = path.read() if hasattr(path, "read") else Path(path).read_bytes()
    wave = audio.open_bytes(data, _LIMITS)
    if sr is not None:
        wave = audio.resampled(wave, int(sr))
    return wave.samples, wave.rate


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """Convert a PIL image to another mode. For RGB, transparency becomes white and 16-bit grey is scaled.

    Raises:
        ParamsError: PIL has no such mode or no conversion to it.
    """
    if image.mode == to_mode:
        return image
    if to_mode == "RGB":
        return decode.to_rgb(image, [])
    try:
        return image.convert(to_mode)
    except ValueError as error:
        raise ParamsError(f"An image cannot be converted to {to_mode!r}: {error}.", param="to_mode") from error


def frames_and_metadata(clip: video.Clip) -> tuple[Any, dict]:
    """A video as `generate` takes it: its frames, with timing metadata where known."""
    metadata = {
        "total_num_frames": clip.total,
        "fps": clip.fps,
        "duration": clip.total / clip.fps if clip.fps else None,
        "frames_indices": list(range(len(clip.frames)) if clip.indices is None else clip.indices),
    }
    return clip.frames, metadata


def _bytes(url: str, modality: str, rules: FetchRules) -> bytes:
    try:
        return fetch(url, modality, rules).data
    except FetchError as error:
        if not url.lower().startswith(("http://", "https://")):
            raise
        raise FetchError(
            f"{url}: {error.reason}", _remedy(url, error), stage=error.stage, detail=error.detail
        ) from error


def _remedy(url: str, error: FetchError) -> str:
    """Return the remedy for a URL that cannot be fetched, including where to put the file by hand."""
    try:
        (place, *_) = places(parse(url)) or ("",)
    except FetchError:
        return error.remedy
    folder = env.MEDIA_CACHE() or "a folder that BEHELD_MEDIA_CACHE names"
    return f"{error.remedy} Without a network, lay the file at {place!r} below {folder}.".strip()
