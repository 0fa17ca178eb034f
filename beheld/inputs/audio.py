"""From the bytes of a sound, or from a waveform, to a mono waveform at the rate the model wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError
from beheld.inputs.container import opened


@dataclass(frozen=True, eq=False)
class Waveform:
    """Samples in float32 from -1 to 1, mono, and their rate in Hz."""

    samples: Any
    rate: int
    given: Mapping[str, Any]
    lost: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it sounds."""
        return float(len(self.samples)) / self.rate


def open_bytes(data: bytes, limits: MediaLimits) -> Waveform:
    """Decode a sound file of any kind that PyAV reads, mixed down to one channel, at its own rate.

    Raises:
        DecodeError: not a sound, or broken, or without samples.
        LimitError: longer than allowed.
    """
    import av
    import numpy as np

    parts: list[Any] = []
    try:
        with opened(data) as container:
            if not container.streams.audio:
                raise DecodeError("The file holds no sound.")
            stream = container.streams.audio[0]
            rate, channels = int(stream.rate or 0), int(stream.channels or 0)
            if rate < 1 or channels < 1:
                raise DecodeError("The sound has no sampling rate or no channels.")
            mixer = av.AudioResampler(format="flt", layout="mono", rate=rate)
            count = 0
            for frame in container.decode(stream):
                for mixed in mixer.resample(frame):
                    parts.append(mixed.to_ndarray().reshape(-1))
                    count += parts[-1].size
                if count > limits.max_audio_s * rate:
                    raise LimitError(f"The sound is longer than {limits.max_audio_s:g} s.", "Cut it first.")
            parts += [mixed.to_ndarray().reshape(-1) for mixed in mixer.resample(None)]
            given = {"format": container.format.name, "rate": rate, "channels": channels}
    except av.FFmpegError as error:
        raise DecodeError(f"The bytes are not a sound that can be read ({type(error).__name__}).") from error
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return _checked(samples.astype(np.float32), rate, given, ("channels were mixed into one",) if channels > 1 else ())


def from_array(samples: Any, rate: Any, limits: MediaLimits) -> Waveform:
    """A waveform from samples (any float or 16-bit type; mono, or (channels, samples)) and their rate.

    Raises:
        DecodeError: another shape, no samples, values that are not finite.
        LimitError: longer than allowed.
    """
    import numpy as np

    array = np.asarray(samples)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1 <= rate <= 1_000_000:
        raise DecodeError(f"The sampling rate must be a number of Hz, got {rate!r}.", "Give (samples, rate).")
    lost: tuple[str, ...] = ()
    given = {"source": "array", "rate": int(rate), "channels": 1}
    if array.ndim == 2:
        axis = 0 if array.shape[0] <= array.shape[1] else 1
        given["channels"] = array.shape[axis]
        lost = ("channels were mixed into one",) if array.shape[axis] > 1 else ()
        array = _floats(array).mean(axis=axis)
    if array.ndim != 1:
        raise DecodeError(f"A sound as an array must have the shape (samples,), not {tuple(array.shape)}.")
    if array.size > limits.max_audio_s * rate:
        raise LimitError(f"The sound is longer than {limits.max_audio_s:g} s.", "Cut it first.")
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
    lost = (*wave.lost, f"the sound was resampled from {wave.rate} to {rate} Hz") if rate < wave.rate else wave.lost
    return Waveform(np.concatenate(parts).astype(np.float32), rate, wave.given, lost)


def _floats(array: Any) -> Any:
    import numpy as np

    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype == np.int16:
        return array.astype(np.float32) / 32768.0
    raise DecodeError(f"A sound as an array must hold floats or 16-bit integers, not {array.dtype}.")


def _checked(samples: Any, rate: int, given: Mapping[str, Any], lost: tuple[str, ...]) -> Waveform:
    import numpy as np

    if samples.size == 0:
        raise DecodeError("The sound is empty: it has 0 samples.")
    if not np.isfinite(samples).all():
        raise DecodeError("The sound holds values that are not finite.")
    return Waveform(samples, rate, {**given, "seconds": round(samples.size / rate, 3)}, lost)
