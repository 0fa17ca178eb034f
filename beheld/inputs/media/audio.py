"""From the bytes of an audio file, or from a waveform, to a mono waveform at the rate the model wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError
from beheld.inputs.media.container import opened

# No recording has less, no converter gives more.
_MIN_RATE = 1_000
_MAX_RATE = 768_000


@dataclass(frozen=True, eq=False)
class Waveform:
    """Samples in float32 from -1 to 1, mono, and their rate in Hz."""

    samples: Any
    rate: int
    given: Mapping[str, Any]
    lost: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return float(len(self.samples)) / self.rate


def open_bytes(data: bytes, limits: MediaLimits, rate: int | None = None) -> Waveform:
    """Decode an audio file of any kind that PyAV reads, mixed down to one channel.

    Args:
        data: the file.
        limits: bounds.
        rate: wanted, in Hz; None leaves the file's own. It is resampled as it is decoded, so that long audio at a
            high rate is never in memory as a whole.

    Raises:
        DecodeError: not audio, or broken, or without samples, or of a rate that no audio has.
        LimitError: longer than allowed.
    """
    import av
    import numpy as np

    parts: list[Any] = []
    try:
        with opened(data) as container:
            if not container.streams.audio:
                raise DecodeError("The file holds no audio.", "Give one that does.")
            stream = container.streams.audio[0]
            own, channels = int(stream.rate or 0), int(stream.channels or 0)
            if channels < 1:
                raise DecodeError("The audio has no channels.", "Write the file again.")
            _check_rate(own)
            count = 0
            for samples, count in _decoded(container, stream, rate or own):
                _check_length(count, own, channels, limits)
                parts.append(samples)
            given = {"format": container.format.name, "rate": own, "channels": channels}
    except av.FFmpegError as error:
        raise DecodeError(
            "The bytes are not audio that can be read.",
            "Send it again, complete, or in another format, for instance as WAV.",
            detail=type(error).__name__,
        ) from error
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    lost = ("channels were mixed into one",) if channels > 1 else ()
    given["seconds"] = round(count / own, 3)
    return _checked(samples, rate or own, given, (*lost, *_rate_lost(own, rate or own)))


def _decoded(container: Any, stream: Any, rate: int) -> Iterator[tuple[Any, int]]:
    """Pieces of mono samples at `rate`, and how many samples of the file's own rate have been decoded by then."""
    import av

    own = int(stream.rate)
    mixer = av.AudioResampler(format="flt", layout="mono", rate=own)
    count = 0
    resampler = None if rate == own else av.AudioResampler(format="flt", layout="mono", rate=rate)
    for frame in _frames(container, stream):
        for mixed in mixer.resample(frame):
            count += mixed.samples
            if resampler is None:
                yield _samples(mixed), count
                continue
            # A time that jumps is the container's; samples follow one another.
            mixed.pts = None
            for piece in resampler.resample(mixed):
                yield _samples(piece), count
    if resampler is not None:
        for piece in resampler.resample(None):
            yield _samples(piece), count


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """The decoded frames, and None for their end."""
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
    """Refuse `count` samples of each channel if they are too many."""
    if count > limits.max_audio_s * rate:
        raise LimitError(f"The audio is longer than {limits.max_audio_s:g} s.", "Cut it first.")
    if count * channels > limits.max_audio_samples:
        raise LimitError(
            f"The audio has more than {limits.max_audio_samples} samples.", "Cut it, or resample it first."
        )


def _rate_lost(own: int, rate: int) -> tuple[str, ...]:
    return (f"the audio was resampled from {own} to {rate} Hz",) if rate < own else ()


def _number(value: Any) -> bool:
    """True for numbers of Python's and of numpy's kinds, which is where rates often come from."""
    return isinstance(value, Real) and not isinstance(value, bool)


def from_array(samples: Any, rate: Any, limits: MediaLimits) -> Waveform:
    """A waveform from samples (any float or 16-bit type; mono, or (channels, samples)) and their rate.

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
            "Give the samples of one item, and several items as a list.",
        )
    _check_length(array.size, rate, 1, limits)
    return _checked(_floats(array), int(rate), given, lost)


def resampled(wave: Waveform, rate: int) -> Waveform:
    """The waveform at another rate."""
    import av
    import numpy as np

    if wave.rate == rate:
        return wave
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(wave.samples[None]), format="flt", layout="mono")
    frame.sample_rate = wave.rate
    mixer = av.AudioResampler(format="flt", layout="mono", rate=rate)
    parts = [m.to_ndarray().reshape(-1) for m in [*mixer.resample(frame), *mixer.resample(None)]]
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
        raise DecodeError("The audio is empty: it has 0 samples.", "Leave it out if there is nothing to hear.")
    if not np.isfinite(samples).all():
        raise DecodeError("The audio holds values that are not finite.", "Replace them first.")
    return Waveform(samples, rate, {"seconds": round(samples.size / rate, 3), **given}, lost)
