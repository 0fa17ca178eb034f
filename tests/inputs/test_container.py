"""Sound and video files are opened for what they hold; a file that points elsewhere is none."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import av
import pytest

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError
from beheld.inputs.media import audio, video
from tests import tiny
from tests.inputs.pipes import write_video

LIMITS = MediaLimits()
SAMPLING = video.FrameSampling.of({})
POINTERS = {
    "concat": "ffconcat version 1.0\nfile {name}\n",
    "hls": "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{name}\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
    'mediaPresentationDuration="PT1S" profiles="urn:mpeg:dash:profile:isoff-on-demand:2011"><Period><AdaptationSet '
    'mimeType="audio/wav"><Representation id="1" bandwidth="1"><BaseURL>{name}</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
}


@pytest.mark.case(10, 29)
@pytest.mark.parametrize("kind", POINTERS)
def test_a_file_that_names_another_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sound.wav").write_bytes(tiny.wav(tiny.sound(0.5)))
    write_video(tmp_path / "video.mp4", tiny.frames(4))
    for name in ("sound.wav", str(tmp_path / "sound.wav"), (tmp_path / "sound.wav").as_uri()):
        with pytest.raises(DecodeError):
            audio.open_bytes(POINTERS[kind].format(name=name).encode(), LIMITS)
    with pytest.raises(DecodeError):
        video.open_bytes(POINTERS[kind].format(name="video.mp4").encode(), SAMPLING, LIMITS)


@pytest.mark.case(29)
def test_a_session_description_does_not_listen() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = ("v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=x", "c=IN IP4 127.0.0.1", "t=0 0", f"m=audio {port} RTP/AVP 0", "")
    begin = time.monotonic()
    with pytest.raises(DecodeError):
        audio.open_bytes("\n".join(lines).encode(), LIMITS)
    # One that is opened waits ten seconds for packets.
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
    ("ending", "codec"),
    [("wav", "pcm_s16le"), ("flac", "flac"), ("ogg", "libopus"), ("mp3", "libmp3lame"),
     ("m4a", "aac"), ("webm", "libopus"), ("aiff", "pcm_s16be"), ("aac", "aac"), ("avi", "pcm_s16le")],
)  # fmt: skip
def test_the_usual_sound_files_are_read(ending: str, codec: str, tmp_path: Path) -> None:
    path = tmp_path / f"sound.{ending}"
    rate = 48000
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(tiny.sound(1.0)[None], format="flt", layout="mono")
        frame.sample_rate = tiny.SOUND_RATE
        converter = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        fifo = av.AudioFifo()
        for made in [*converter.resample(frame), *converter.resample(None)]:
            fifo.write(made)
        while (piece := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    heard = audio.open_bytes(path.read_bytes(), LIMITS)
    assert heard.rate == rate
    assert heard.seconds == pytest.approx(1.0, abs=0.1)
