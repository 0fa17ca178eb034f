"""Decodes audio files and waveforms to mono waveforms at the model's rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError
from beheld.inputs.media.container import check_codec, opened

# The range of rates that recordings and converters use.
_MIN_RATE = 1_000
_MAX_RATE = 768_000
# Samples lie from -1 to 1, or are whole numbers of 32 bits; of far larger ones the squares are not finite any more.
_MAX_SAMPLE = float(1 << 32)


@dataclass(frozen=True, eq=False)
class Waveform:
    """Mono samples in float32 from -1 to 1, and their rate in Hz."""

    samples: Any
    rate: int
    given: Mapping[str, Any]
    lost: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the length in seconds."""
        return float(len(self.samples)) / self.rate


def open_bytes(data: bytes, limits: MediaLimits, rate: int | None = None) -> Waveform:
    """Decode an audio file of any kind that PyAV reads, mixed down to one channel.

    Args:
        data: the file's bytes.
        limits: on size and length.
        rate: the wanted rate in Hz; None keeps the file's. Resampling happens during decoding, so that long audio at a
            high rate is never in memory as a whole.

    Raises:
        DecodeError: not audio, broken, without samples, or at an impossible rate.
        LimitError: longer than allowed.
    """
    import av
    import numpy as np

    parts: list[Any] = []
    try:
        with opened(data) as container:
            if not container.streams.audio:
                raise DecodeError("The file holds no audio.", "Send a file with audio.")
            stream = container.streams.audio[0]
            check_codec(stream, "audio")
            own, channels = int(stream.rate or 0), int(stream.channels or 0)
            if channels < 1:
                raise DecodeError("The audio has no channels.", "Save the file again.")
            _check_rate(own)
            count = 0
            for samples, count in _decoded(container, stream, rate or own):
                _check_length(count, own, channels, limits)
                parts.append(samples)
            given = {"format": container.format.name, "rate": own, "channels": channels}
    except av.FFmpegError as error:
        raise DecodeError(
            "Invalid or corrupted audio data: the bytes are not audio that can be read.",
            "Send the complete file, or another format such as WAV.",
            detail=type(error).__name__,
        ) from error
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    lost = ("channels were mixed into one",) if channels > 1 else ()
    given["seconds"] = round(count / own, 3)
    return _checked(samples, rate or own, given, (*lost, *_rate_lost(own, rate or own)))


def _decoded(container: Any, stream: Any, rate: int) -> Iterator[tuple[Any, int]]:
    """Yield pieces of mono samples at `rate`, with the number of samples decoded so far at the file's rate."""
    import av

    own = int(stream.rate)
    mixer = av.AudioResampler(format="flt", layout="mono", rate=own)
    count = 0
    resampler = None if rate == own else av.AudioResampler(format="flt", layout="mono", rate=rate)
    first = None
    for frame in _frames(container, stream):
        if frame is not None:
            form = frame.sample_rate, frame.layout.name, frame.format.name
            first = first or form
            if form != first:
                raise DecodeError(
                    "The audio changes its sampling rate or its channels midway.", "Write it anew with one of each."
                )
        for mixed in mixer.resample(frame):
            count += mixed.samples
            if resampler is None:
                yield _samples(mixed), count
                continue
            # A jump in timestamps comes from the container; the samples are continuous.
            mixed.pts = None
            for piece in resampler.resample(mixed):
                yield _samples(piece), count
    if resampler is not None:
        for piece in resampler.resample(None):
            yield _samples(piece), count


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Yield the decoded frames, and None at their end."""
    yield from container.decode(stream)
    yield None


def _samples(frame: Any) -> Any:
    return frame.to_ndarray().reshape(-1)


def _check_rate(rate: float) -> None:
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise DecodeError(
            f"The sampling rate is {rate:g} Hz; it must be from {_MIN_RATE} to {_MAX_RATE}.", "Resample it first."
        )


def _check_length(count: int, rate: float, channels: int, limits: MediaLimits) -> None:
    """Refuse `count` samples per channel if they are too many."""
    if count > limits.max_audio_s * rate:
        raise LimitError(f"The audio is longer than {limits.max_audio_s:g} s.", "Cut it first.")
    if count * channels > limits.max_audio_samples:
        raise LimitError(
            f"The audio has more than {limits.max_audio_samples} samples.", "Cut it, or resample it first."
        )


def _rate_lost(own: int, rate: int) -> tuple[str, ...]:
    return (f"the audio was resampled from {own} to {rate} Hz",) if rate < own else ()


def _number(value: Any) -> bool:
    """Return whether a value is one of Python's or numpy's numbers, which rates often are."""
    return isinstance(value, Real) and not isinstance(value, bool)


def from_array(samples: Any, rate: Any, limits: MediaLimits) -> Waveform:
    """Return a waveform from samples (any float or 16-bit type; mono, or (channels, samples)) and their rate.

    Raises:
        DecodeError: another shape, no samples, values that are not finite.
        LimitError: longer than allowed.
    """
    import numpy as np

    array = np.asarray(samples)
    if not _number(rate):
        raise DecodeError(f"The sampling rate must be a number of Hz, got {rate!r}.", "Give (samples, rate).")
    _check_rate(rate)
    lost: tuple[str, ...] = ()
    given = {"source": "array", "rate": int(rate), "channels": 1}
    if array.ndim == 2:
        axis = 0 if array.shape[0] <= array.shape[1] else 1
        given["channels"] = array.shape[axis]
        lost = ("channels were mixed into one",) if array.shape[axis] > 1 else ()
        array = _floats(array).mean(axis=axis)
    if array.ndim != 1:
        raise DecodeError(
            f"Audio as an array must have the shape (samples,), not {tuple(array.shape)}.",
            "Pass one item's samples, or several items as a list.",
        )
    _check_length(array.size, rate, 1, limits)
    return _checked(_floats(array), int(rate), given, lost)


def resampled(wave: Waveform, rate: int) -> Waveform:
    """Return the waveform at another rate.

    Raises:
        DecodeError: it has so few samples that none is left at that rate.
    """
    import av
    import numpy as np

    if wave.rate == rate:
        return wave
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(wave.samples[None]), format="flt", layout="mono")
    frame.sample_rate = wave.rate
    mixer = av.AudioResampler(format="flt", layout="mono", rate=rate)
    parts = [m.to_ndarray().reshape(-1) for m in [*mixer.resample(frame), *mixer.resample(None)]]
    if not parts:
        count = f"{wave.samples.size} {'sample' if wave.samples.size == 1 else 'samples'} at {wave.rate} Hz"
        raise DecodeError(f"The audio is too short: {count}, none at {rate} Hz.", "Use a longer audio file.")
    lost = (*wave.lost, *_rate_lost(wave.rate, rate))
    return Waveform(np.concatenate(parts).astype(np.float32), rate, wave.given, lost)


def _floats(array: Any) -> Any:
    import numpy as np

    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype == np.int16:
        return array.astype(np.float32) / 32768.0
    raise DecodeError(
        f"Audio as an array must hold floats or 16-bit integers, not {array.dtype}.",
        "Scale it to -1 to 1, as floats.",
    )


def _checked(samples: Any, rate: int, given: Mapping[str, Any], lost: tuple[str, ...]) -> Waveform:
    import numpy as np

    if samples.size == 0:
        raise DecodeError("The audio is empty: it has 0 samples.", "Leave the item out.")
    if not np.isfinite(samples).all():
        raise DecodeError("The audio holds values that are not finite.", "Replace them first.")
    if max(-samples.min(), samples.max()) > _MAX_SAMPLE:
        raise DecodeError(f"The audio holds values beyond {_MAX_SAMPLE:.0f}.", "Scale it to -1 to 1.")
    return Waveform(samples, rate, {"seconds": round(samples.size / rate, 3), **given}, lost)
