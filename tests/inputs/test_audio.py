"""Sound: decoded from any container to a mono waveform, mixed and resampled with a note, refused if malformed."""

from __future__ import annotations

import io
import wave
from typing import Any

import av
import numpy as np
import pytest

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError
from beheld.inputs.media import audio

LIMITS = MediaLimits(max_audio_s=5.0)
TONE = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000).astype(np.float32) * 0.5


def wav(samples: np.ndarray, rate: int = 16000, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def test_a_file_gives_its_samples() -> None:
    heard = audio.open_bytes(wav(TONE), LIMITS)
    assert heard.rate == 16000
    assert heard.seconds == 1.0
    assert heard.lost == ()
    assert np.abs(heard.samples - TONE).max() < 1e-3


def test_channels_are_mixed() -> None:
    both = np.stack([TONE, np.zeros_like(TONE)], axis=1)
    heard = audio.open_bytes(wav(both, channels=2), LIMITS)
    assert heard.given["channels"] == 2
    assert "mixed" in heard.lost[0]
    assert np.abs(heard.samples).max() < 0.4
    array = audio.from_array(both, 16000, LIMITS)
    assert np.allclose(array.samples, TONE / 2)


def test_resampling_keeps_the_tone() -> None:
    heard = audio.resampled(audio.from_array(TONE, 16000, LIMITS), 8000)
    assert heard.rate == 8000
    assert heard.seconds == pytest.approx(1.0, abs=0.01)
    strength = np.abs(np.fft.rfft(heard.samples))
    assert np.argmax(strength) * 8000 / len(heard.samples) == pytest.approx(440, abs=3)
    assert "resampled" in heard.lost[0]
    assert audio.resampled(heard, 8000) is heard


def test_integers_are_scaled() -> None:
    assert np.allclose(audio.from_array((TONE * 32767).astype(np.int16), 16000, LIMITS).samples, TONE, atol=1e-3)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        (np.zeros(0, np.float32), 16000),
        (np.full(9, np.nan, np.float32), 16000),
        (np.zeros((2, 2, 2), np.float32), 16000),
        (np.zeros(9, np.int64), 16000),
        (TONE, 0),
        (TONE, 2**31),
        (TONE, "16k"),
        (TONE, True),
    ],
)
@pytest.mark.case(29)
def test_malformed_arrays_are_refused(samples: Any, rate: Any) -> None:
    with pytest.raises(DecodeError):
        audio.from_array(samples, rate, LIMITS)


@pytest.mark.case(29)
def test_what_is_no_sound_is_refused() -> None:
    for data in (b"", b"nothing", wav(TONE)[:30], wav(TONE[:0])):
        with pytest.raises(DecodeError):
            audio.open_bytes(data, LIMITS)
    long = np.zeros(16000 * 6, np.float32)
    with pytest.raises(LimitError, match="longer than 5 s"):
        audio.open_bytes(wav(long), LIMITS)
    with pytest.raises(LimitError, match="longer than 5 s"):
        audio.from_array(long, 16000, LIMITS)


def encoded(form: str, codec: str, rate: int, layout: str) -> bytes:
    buffer = io.BytesIO()
    options = {"write_xing": "0", "id3v2_version": "0"} if form == "mp3" else {}
    with av.open(buffer, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        converter = av.AudioResampler(format=stream.codec_context.format, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(TONE[None], format="flt", layout="mono")
        frame.sample_rate = 16000
        fifo = av.AudioFifo()
        for piece in converter.resample(frame):
            fifo.write(piece)
        while (piece := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.case(103)
@pytest.mark.parametrize(("form", "codec"), [("adts", "aac"), ("mp3", "mp3")])
@pytest.mark.parametrize("second", [(16000, "stereo"), (48000, "mono")])
def test_sound_that_changes_midway_is_refused(form: str, codec: str, second: tuple[int, str]) -> None:
    """It was an error of the server's."""
    first = encoded(form, codec, 16000, "mono")
    assert audio.open_bytes(first + first, LIMITS).seconds > 1.9
    with pytest.raises(DecodeError, match="midway"):
        audio.open_bytes(first + encoded(form, codec, *second), LIMITS)


@pytest.mark.case(103)
def test_codecs_that_nobody_knows_are_refused() -> None:
    data = bytearray(wav(TONE))
    data[20:22] = b"\x34\x12"
    with pytest.raises(DecodeError, match="codec that is not known"):
        audio.open_bytes(bytes(data), LIMITS)


@pytest.mark.case(103)
@pytest.mark.parametrize("size", [1e18, 1e30, 3e38])
def test_samples_whose_squares_are_not_finite_are_refused(size: float) -> None:
    with pytest.raises(DecodeError, match="beyond"):
        audio.from_array(TONE * np.float32(size), 16000, LIMITS)
    assert audio.from_array(TONE * np.float32(1 << 31), 16000, LIMITS).seconds == 1.0
