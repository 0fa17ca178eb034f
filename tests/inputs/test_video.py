"""Videos: the right frames at the right times, few of the others decoded, and clear refusals."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, MediaError, ParamsError
from beheld.inputs.media import video
from beheld.inputs.media.video import FrameSampling
from beheld.inputs.pipeline import RequestOrder
from tests import tiny
from tests.inputs import pipes

LIMITS = MediaLimits()


def numbered(count: int) -> np.ndarray:
    """Frames that show their number in binary, a black or white column of 16 pixels for each of 8 digits."""
    digits = (np.arange(count)[:, None] >> np.arange(8)) & 1
    columns = np.repeat(digits, 16, axis=1).astype(np.uint8) * 255
    return np.broadcast_to(columns[:, None, :, None], (count, 64, 128, 3)).copy()


def numbers(clip: video.Clip) -> list[int]:
    """The numbers that the frames show."""
    columns = clip.frames.mean(axis=(1, 3)).reshape(len(clip.frames), 8, 16).mean(axis=2)
    return [int(((row > 128) << np.arange(8)).sum()) for row in columns]


def test_indices_are_even_and_hold_both_ends() -> None:
    assert FrameSampling(4).indices(10, 0) == [0, 3, 6, 9]
    assert FrameSampling(1).indices(10, 0) == [0]
    assert FrameSampling(32).indices(5, 0) == [0, 1, 2, 3, 4]
    assert FrameSampling(None).indices(5, 0) == [0, 1, 2, 3, 4]
    assert FrameSampling(None, 2.0).indices(80, 8.0)[:2] == [0, 4]
    assert FrameSampling.of({"fps": 1e308}).indices(80, 8.0) == list(range(80))
    for wrong in (10**400, float("nan"), float("inf"), 0, True, "2"):
        with pytest.raises(ParamsError, match="fps"):
            FrameSampling.of({"fps": wrong})
    assert len(FrameSampling(None, 2.0).indices(80, 8.0)) == 20
    assert len(FrameSampling(6, 2.0).indices(80, 8.0)) == 6
    for total in range(1, 50):
        for wanted in range(1, 50):
            found = FrameSampling(wanted).indices(total, 0)
            assert len(found) == min(total, wanted)
            assert found == sorted(set(found))
            assert found[0] == 0
            assert found[-1] == total - 1 or wanted == 1


@pytest.mark.parametrize("form", ["mp4", "gif"])
def test_124_frames_are_in_memory_once(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory of FFmpeg's own is not traced.
    rgb = video._rgb
    monkeypatch.setattr(video, "_rgb", lambda frame, limits: np.array(rgb(frame, limits)))
    frames = np.repeat(np.repeat(numbered(24), 4, axis=1), 4, axis=2)
    if form == "mp4":
        data = pipes.write_video(tmp_path / "v.mp4", frames).read_bytes()
    else:
        first, *others = map(Image.fromarray, frames)
        first.save(tmp_path / "v.gif", save_all=True, append_images=others, duration=100)
        data = (tmp_path / "v.gif").read_bytes()
    video.open_bytes(data, FrameSampling(2), LIMITS)
    tracemalloc.start()
    try:
        clip = video.open_bytes(data, FrameSampling(24), LIMITS)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(clip.frames) == 24
    assert most < 1.5 * clip.frames.nbytes


@pytest.mark.parametrize("gop", [1, 5, 200])
@pytest.mark.parametrize("wanted", [1, 3, 7, 120])
def test_sampled_frames_are_the_right_ones(tmp_path: Path, gop: int, wanted: int) -> None:
    path = pipes.write_video(tmp_path / "v.mp4", numbered(120), gop=gop)
    clip = video.open_bytes(path.read_bytes(), FrameSampling(wanted), LIMITS)
    assert clip.total == 120
    assert list(clip.indices or ()) == FrameSampling(wanted).indices(120, 8)
    assert numbers(clip) == list(clip.indices or ())
    times = clip.timestamps_s()
    assert times is not None
    assert times[-1] == pytest.approx((clip.indices or (0,))[-1] / 8, abs=1e-3)
    assert bool(clip.lost) == (wanted < 120)


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mkv", "mpeg4"), ("avi", "mjpeg"), ("webm", "libvpx"), ("mp4", "libx264")]
)
def test_other_containers(tmp_path: Path, suffix: str, codec: str) -> None:
    try:
        path = pipes.write_video(tmp_path / f"v.{suffix}", numbered(60), codec=codec)
    except Exception:
        pytest.skip(f"this build of FFmpeg cannot write {codec}")
    clip = video.open_bytes(path.read_bytes(), FrameSampling(6), LIMITS)
    assert numbers(clip) == list(clip.indices or ()) == FrameSampling(6).indices(60, 8)


@pytest.mark.case(28)
def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    whole = pipes.write_video(tmp_path / "v.mp4", numbered(40)).read_bytes()
    for data in (b"", b"nothing", whole[:100], pipes.encoded(tiny.picture(8, 8, 1), "BMP")[:20]):
        with pytest.raises(DecodeError) as caught:
            video.open_bytes(data, FrameSampling(), LIMITS)
        # What the library calls it is for the log alone.
        assert "Error" not in caught.value.reason
    with pytest.raises(LimitError, match="pixels"):
        video.open_bytes(whole, FrameSampling(), MediaLimits(max_pixels=100))
    with pytest.raises(LimitError, match="40 frames of the video would be sampled"):
        video.open_bytes(whole, FrameSampling(None), MediaLimits(max_frames=10))


def test_arrays_are_checked() -> None:
    good = tiny.frames(4)
    bad: list[Any] = [
        good[:0],
        good.astype(np.float32),
        good[:, :, :, :2],
        good[0],
        [],
        [good[0], good[1][:10]],
        np.zeros((2, 0, 4, 3), np.uint8),
    ]
    for frames in bad:
        with pytest.raises(DecodeError):
            video.from_frames(frames, None, LIMITS)
    with pytest.raises(LimitError):
        video.from_frames(good, None, MediaLimits(max_frames=3))
    wrong: list[dict[str, Any]] = [
        {"fps": 0},
        {"fps": float("nan")},
        {"frames_indices": [1, 2]},
        {"total_num_frames": 3},
        {"total_num_frames": "9"},
        {"frames": 3},
    ]
    for metadata in wrong:
        with pytest.raises(DecodeError):
            video.from_frames(good, metadata, LIMITS)


@pytest.mark.parametrize(
    "options",
    [
        *({"num_frames": value} for value in (0, -2, "a", 1.5, float("nan"), float("inf"), True, [1], {})),
        *({"fps": value} for value in (0, -1, "a", float("nan"), float("inf"), -float("inf"), True, [1])),
        *({name: 1} for name in ("max_frames", "backend", "device", "num_threads", "fsp")),
    ],
    ids=repr,
)
@pytest.mark.case(27)
def test_sampling_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ParamsError):
        FrameSampling.of(options)
    with pytest.raises(ParamsError, match="'fps'"):
        FrameSampling.of({"fsp": 1})


@pytest.mark.parametrize(
    "options", [{"num_frames": 10**9}, {"fps": 1e9}, {"fps": 1e9, "num_frames": -1}, {"fps": 1e-9}]
)
@pytest.mark.case(27)
def test_work_is_bounded_whatever_is_asked_for(tmp_path: Path, options: dict[str, Any]) -> None:
    data = pipes.write_video(tmp_path / "v.mp4", numbered(20)).read_bytes()
    clip = video.open_bytes(data, FrameSampling.of(options), LIMITS)
    assert len(clip.frames) == (1 if options.get("fps") == 1e-9 else 20)
    with pytest.raises(LimitError):
        video.open_bytes(data, FrameSampling.of({"num_frames": 10**9}), MediaLimits(max_frames=19))


@pytest.mark.case(28)
def test_an_empty_video_is_an_error_of_that_request_alone() -> None:
    family = "qwen2_vl"
    pipe = pipes.shared(family)
    for empty in (tiny.frames(1)[:0], []):
        with pytest.raises(MediaError, match="0 frames") as caught:
            pipes.ask(pipe, family, videos=[empty] if isinstance(empty, np.ndarray) else [[]])
        assert caught.value.item == "video 1"
    assert pipes.ask(pipe, family, videos=tiny.frames(2)).spans


def test_a_file_is_sampled_with_its_true_times(tmp_path: Path) -> None:
    """32 of 64 frames at 8 a second are 4 a second: a grid step of two frames lasts half a second."""
    family = "qwen2_5_vl"
    path = pipes.write_video(tmp_path / "v.mp4", numbered(64))
    request = pipes.ask(pipes.make(family), family, videos=path)
    item, receipt = request.spans[0].item, request.receipts[0]
    assert item.layout["second_per_grid_ts"] == pytest.approx((0.5,))
    assert item.layout["video_grid_thw"][0] == 16
    assert receipt.used["frames"] == 32
    assert len(receipt.used["timestamps_s"]) == 32
    assert receipt.lost[0] == "32 of 64 frames were not used"
    few = pipes.ask(pipes.make(family, media_io_kwargs={"video": {"num_frames": 4}}), family, videos=path)
    assert few.spans[0].item.layout["video_grid_thw"][0] == 2
    every = pipes.ask(pipes.make(family, media_io_kwargs={"video": {"num_frames": -1}}), family, videos=path)
    assert every.spans[0].item.layout["video_grid_thw"][0] == 32
    assert every.receipts[0].lost == ()
    paced = pipes.ask(pipes.shared(family), family, videos=path, mm_processor_kwargs={"fps": 1})
    assert paced.spans[0].item.layout["video_grid_thw"][0] == 4
    again = pipes.ask(pipes.shared(family), family, videos=path, mm_processor_kwargs={"fps": 1})
    assert again.receipts[0].cached
    assert "decode" not in again.receipts[0].milliseconds


def test_the_checkpoint_bounds_the_default_number_of_frames(tmp_path: Path) -> None:
    from beheld.checkpoint.info import read_info
    from beheld.core.config import EngineArgs
    from beheld.inputs.pipeline import InputPipeline

    folder = tmp_path / "few"
    shutil.copytree(tiny.checkpoint("qwen2_5_vl"), folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    settings = folder / "video_preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"max_frames": 8}))
    path = pipes.write_video(tmp_path / "v.mp4", numbered(64))
    args = EngineArgs(model=str(folder))
    model = read_info(folder, args)
    for options, grid in (({}, 4), ({"num_frames": 12}, 6), ({"fps": 2}, 8)):
        pipe = InputPipeline(
            model, pipes.config(model), EngineArgs(model=str(folder), media_io_kwargs={"video": options})
        )
        assert pipes.ask(pipe, "qwen2_5_vl", videos=path).spans[0].item.layout["video_grid_thw"][0] == grid


def test_fps_of_bare_frames_is_their_rate() -> None:
    family = "qwen2_5_vl"
    request = pipes.ask(pipes.shared(family), family, videos=tiny.frames(4), mm_processor_kwargs={"fps": 4.0})
    assert request.spans[0].item.layout["second_per_grid_ts"] == (0.5,)


@pytest.mark.parametrize(
    ("indices", "total", "reason"),
    [
        ([3, 2, 1, 0], 4, "must not decrease"),
        ([0, 2, 1, 3], 4, "must not decrease"),
        ([-1, 0, 1, 2], 4, "0 or above"),
        ([0, 1, 2, 99], 4, "contains 99, but total_num_frames is 4"),
        ([0, 1, 2, 4], 4, "contains 4"),
        ([0, 1, 2, 2.5], 4, "whole numbers"),
        ([0, 1, 2, "3"], 4, "whole numbers"),
        (4, 4, "whole numbers"),
    ],
)
def test_places_at_odds_with_the_video_are_refused(indices: Any, total: int, reason: str) -> None:
    metadata = {"fps": 2.0, "total_num_frames": total, "frames_indices": indices}
    with pytest.raises(DecodeError, match=reason) as caught:
        video.from_frames(tiny.frames(4), metadata, LIMITS)
    assert caught.value.remedy


def test_places_may_be_any_whole_numbers_and_repeat() -> None:
    for indices in ([0, 3, 7, 7], np.array([0, 3, 7, 7]), (0, np.int64(3), 7, 7)):
        clip = video.from_frames(tiny.frames(4), {"fps": 2.0, "frames_indices": indices}, LIMITS)
        assert (clip.indices, clip.total) == ((0, 3, 7, 7), 8)
        assert clip.timestamps_s() == (0.0, 1.5, 3.5, 3.5)


def asked(family: str, given: Any, **options: Any) -> Any:
    prompt = tiny.wrap(family, tiny.markers(family, num_videos=1) + "What?")
    data = {"prompt": prompt, "multi_modal_data": {"video": given}, "mm_processor_kwargs": options}
    return pipes.shared(family).prepare(RequestOrder(data, pipes.ONE_TOKEN, request_id="0"))


GLM = [family for family in tiny.VIDEO_FAMILIES if family.startswith("glm4")]


@pytest.mark.parametrize("family", GLM)
def test_frames_without_times_are_refused_with_what_to_give_instead(family: str) -> None:
    frames = tiny.frames(6)
    for given in (frames, list(frames), (frames, {"frames_indices": list(range(6))})):
        with pytest.raises(MediaError, match="times of the video's frames are unknown") as caught:
            asked(family, given)
        assert caught.value.remedy.startswith('Give (frames, {"fps"')
    # What the remedy says helps.
    assert asked(family, (frames, {"fps": 2.0})).receipts[0].used["frames"] == 6


def test_frames_without_times_have_the_rate_at_which_ernie_samples() -> None:
    family, frames = "ernie4_5_vl_moe", tiny.frames(6)
    plain = asked(family, frames)
    assert plain.receipts[0].used["assumed_fps"] == 2.0
    assert plain.receipts[0].used["timestamps_s"] == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    told = asked(family, (frames, {"fps": 2.0, "frames_indices": list(range(6))}))
    assert "assumed_fps" not in told.receipts[0].used
    assert plain.token_ids == told.token_ids
    mine, theirs = plain.spans[0].item.features, told.spans[0].item.features
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    # The places that were told stay, and times are drawn on frames.
    later = asked(family, (frames, {"frames_indices": [0, 2, 4, 6, 8, 10]}))
    assert later.receipts[0].used["timestamps_s"] == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    with pytest.raises(MediaError, match="cannot be sampled by a rate"):
        asked(family, frames, fps=1.0)


@pytest.mark.parametrize("family", GLM)
def test_a_single_frame_is_refused_with_what_to_give_instead(family: str) -> None:
    metadata = {"fps": 2.0, "total_num_frames": 1, "frames_indices": [0]}
    with pytest.raises(MediaError) as caught:
        asked(family, (tiny.frames(1), metadata))
    assert caught.value.remedy == "Give more than one frame, or the frame as an image."


@pytest.mark.parametrize("family", ["ernie4_5_vl_moe", "qwen2_5_vl", "qwen3_vl"])
def test_a_bound_on_frames_bounds_files_and_refuses_frames_beyond_it(family: str, tmp_path: Path) -> None:
    pipes.write_video(tmp_path / "v.mp4", tiny.frames(10))
    data = (tmp_path / "v.mp4").read_bytes()
    assert asked(family, data).receipts[0].used["frames"] == 10
    assert asked(family, data, max_frames=6).receipts[0].used["frames"] == 6
    assert asked(family, data, max_frames=6, num_frames=4).receipts[0].used["frames"] == 4
    assert asked(family, data, max_frames=4, fps=1000.0).receipts[0].used["frames"] == 4
    frames = (tiny.frames(6), {"fps": 2.0, "frames_indices": list(range(6))})
    assert asked(family, frames, max_frames=6).receipts[0].used["frames"] == 6
    with pytest.raises(MediaError, match="max_frames is 4, but 6 frames were given") as caught:
        asked(family, frames, max_frames=4)
    assert "do_sample_frames" in caught.value.remedy


def test_a_file_of_the_machine_is_not_a_clients_to_name() -> None:
    with pytest.raises(ParamsError, match="no option 'font'"):
        asked("ernie4_5_vl_moe", tiny.frames(6), font="/etc/hostname")


@pytest.mark.parametrize("family", tiny.VIDEO_FAMILIES)
def test_options_that_choose_among_frames_are_told_where_frames_are_taken_as_they_are(
    family: str, tmp_path: Path
) -> None:
    given = (tiny.frames(6), {"fps": 2.0, "frames_indices": list(range(6))})
    plain, told = asked(family, given), asked(family, given, fps=1.0, num_frames=3)
    assert "options_without_effect" not in plain.receipts[0].used
    assert told.receipts[0].used["options_without_effect"] == ["num_frames", "fps"]
    assert told.token_ids == plain.token_ids
    mine, theirs = told.spans[0].item.features, plain.spans[0].item.features
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    pipes.write_video(tmp_path / "v.mp4", tiny.frames(6))
    # Of a file they choose.
    of_file = asked(family, (tmp_path / "v.mp4").read_bytes(), num_frames=4).receipts[0].used
    assert "options_without_effect" not in of_file
