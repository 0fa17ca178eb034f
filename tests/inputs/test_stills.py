"""Videos as JPEG frames in one data URL: they are the frames, within the limits of other videos."""

from __future__ import annotations

import base64
import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.compat.encoding import encode_video_base64, encode_video_url
from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, FetchError, LimitError, ParamsError
from beheld.inputs.fetch.fetch import FetchRules, fetch
from beheld.inputs.media import stills, video

LIMITS = MediaLimits()


def drawn(count: int = 3, width: int = 24, height: int = 16) -> Any:
    """Frames of a slope that gets lighter."""
    slope = np.linspace(0, 120, width * height).reshape(1, height, width, 1)
    return (slope + 30 * np.arange(count).reshape(-1, 1, 1, 1)).repeat(3, 3).astype(np.uint8)


def opened(url: str, limits: MediaLimits = LIMITS) -> video.Clip:
    data = fetch(url, "video", FetchRules.of(None, None, limits)).data
    return video.open_bytes(data, video.FrameSampling(2), limits)


def test_all_frames_are_there_as_pillow_decodes_them() -> None:
    clip = opened(encode_video_url(drawn()))
    each = [base64.b64decode(one) for one in encode_video_base64(drawn()).split(",")]
    assert np.array_equal(clip.frames, [np.asarray(Image.open(io.BytesIO(one))) for one in each])
    assert np.abs(clip.frames.astype(int) - drawn()).max() < 8
    assert (clip.total, clip.fps, clip.indices, clip.given["frames"]) == (3, None, None, 3)
    assert stills.images_of(stills.joined(each)) == each


def test_what_is_wrong_is_named() -> None:
    png = io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, "PNG")
    cases: list[tuple[str, type[Exception], str]] = [
        ("data:video/jpeg;base64," + base64.b64encode(png.getvalue()).decode(), DecodeError, "not a JPEG"),
        (encode_video_url(drawn(1)) + "," + encode_video_base64(drawn(1, 8, 8)), DecodeError, "different sizes"),
        (encode_video_url(drawn(1)) + ",", FetchError, "empty"),
        (encode_video_url(drawn(1)) + ",&&&&", FetchError, "base64"),
        ("data:video/jpeg;base64,", FetchError, "empty"),
    ]
    for url, kind, words in cases:
        with pytest.raises(kind, match=words):
            opened(url)
    cut = stills.joined([b"\xff\xd8\xff" * 9])[:-4]
    with pytest.raises(DecodeError, match="cut off"):
        video.open_bytes(cut, video.FrameSampling(), LIMITS)
    with pytest.raises(ParamsError, match="JPEG"):
        encode_video_url(drawn(), format="PNG")


@pytest.mark.parametrize("limits", [{"max_frames": 2}, {"max_pixels": 100}, {"max_decoded_bytes": 1000}])
def test_limits_hold(limits: dict[str, int]) -> None:
    with pytest.raises(LimitError):
        opened(encode_video_url(drawn()), MediaLimits(**limits))


def test_89_frames_are_counted_before_they_are_read() -> None:
    """Each would be an object of its own: 6 MB of commas took 918 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="more than 2048 frames"):
            opened("data:video/jpeg;base64," + "," * 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
