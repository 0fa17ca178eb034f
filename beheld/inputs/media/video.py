"""Decodes the bytes of a video, or takes frames, as an array of sampled frames with their times."""

from __future__ import annotations

import math
import operator
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from beheld.core.config import MediaLimits
from beheld.core.errors import DecodeError, LimitError, ParamsError
from beheld.core.value_checks import nearest
from beheld.inputs.media import animation, stills
from beheld.inputs.media.container import check_codec, opened

DEFAULT_FRAMES = 32
_SHRINK = "Shrink it first."
_MAX_PACKETS = 1_000_000


@dataclass(frozen=True)
class FrameSampling:
    """Which frames to sample: at most `num_frames`, evenly spread (None: all), or `fps` per second."""

    num_frames: int | None = DEFAULT_FRAMES
    fps: float | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FrameSampling:
        """Parse media_io_kwargs["video"]: num_frames (-1 means all) and fps.

        Raises:
            ParamsError: an option is unknown or out of range.
        """
        known = ("num_frames", "fps")
        for name in options:
            if name not in known:
                raise ParamsError(f"Unknown video option {name!r}.", nearest(name, known), param=name)
        fps, count = options.get("fps"), options.get("num_frames", DEFAULT_FRAMES)
        if fps is not None:
            if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= sys.float_info.max:
                raise ParamsError(f"fps must be a number above 0, got {fps!r}.", param="fps")
            return cls(None if "num_frames" not in options else _count(count), float(fps))
        return cls(_count(count))

    def at_most(self, most: int | None) -> FrameSampling:
        """Return the sampling limited to `most` frames, if that is not None.

        Raises:
            ParamsError: it is not a whole number above 0.
        """
        if most is None:
            return self
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ParamsError(f"max_frames must be a whole number above 0, got {most!r}.", param="max_frames")
        return replace(self, num_frames=most if self.num_frames is None else min(most, self.num_frames))

    def indices(self, total: int, source_fps: float) -> list[int]:
        """Return the sampled indices of `total` frames, ascending."""
        wanted = total if self.num_frames is None else min(self.num_frames, total)
        if self.fps is not None and source_fps > 0:
            wanted = min(wanted, max(1, math.floor(min(total, total / source_fps * self.fps))))
        if wanted >= total:
            return list(range(total))
        if wanted == 1:
            return [0]
        # First and last frame included, the others as evenly as integers allow.
        return [index * (total - 1) // (wanted - 1) for index in range(wanted)]


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ParamsError(
            f"num_frames must be a whole number above 0, or -1 for all, got {value!r}.", param="num_frames"
        )
    return None if value == -1 else value


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames (frames, height, width, 3) of bytes, and what is known about their times.

    Attributes:
        frames: the sampled frames, a numpy array.
        total: frames in the source.
        fps: of the source; None if unknown.
        indices: the frames' indices in the source; None if they are all its frames.
        given: a description of the source.
        lost: what was not used.
        from_file: whether the frames were sampled while decoding a file.
    """

    frames: Any
    total: int
    fps: float | None
    indices: tuple[int, ...] | None
    given: Mapping[str, Any]
    lost: tuple[str, ...] = ()
    from_file: bool = False

    def timestamps_s(self) -> tuple[float, ...] | None:
        """Return the time of each frame in seconds, if the rate is known."""
        if not self.fps:
            return None
        places = range(len(self.frames)) if self.indices is None else self.indices
        return tuple(round(place / self.fps, 3) for place in places)


def open_bytes(data: bytes, sampling: FrameSampling, limits: MediaLimits) -> Clip:
    """Decode the sampled frames of a video file, and little more.

    Raises:
        DecodeError: not a video, no frames, or broken.
        LimitError: too many pixels or frames.
    """
    if animation.may_be(data) and (found := animation.timeline(data, limits)) is not None:
        return _animated(data, found, sampling, limits)
    if stills.are(data):
        return _of_stills(data, limits)
    import av

    try:
        with opened(data) as container:
            if not container.streams.video:
                raise DecodeError("The file holds no video stream.", "Send a file with video.")
            stream = container.streams.video[0]
            check_codec(stream, "video")
            if int(stream.width or 0) * int(stream.height or 0) > limits.max_pixels:
                raise LimitError(
                    f"The video has {stream.width} x {stream.height} pixels; the limit is {limits.max_pixels}.",
                    _SHRINK,
                )
            fps = float(stream.average_rate or stream.guessed_rate or 0)
            index = _index(container, stream)
            indices = sampling.indices(index.total, fps)
            _check_count(len(indices), limits)
            _check_bytes(len(indices) * int(stream.width or 0) * int(stream.height or 0) * 3, limits)
            work = index.num_decoded(indices) * int(stream.width or 0) * int(stream.height or 0)
            if work > limits.max_video_pixels:
                raise LimitError(
                    f"Of the video, {work} pixels would be decoded; the limit is {limits.max_video_pixels}.",
                    "Cut or shrink it first, or save it with more key frames.",
                )
            taken = _stacked(_decode(container, stream, index, indices, limits), len(indices), limits)
            given = {"format": str(container.format.name), "width": stream.width, "height": stream.height}
    except av.FFmpegError as error:
        raise DecodeError(
            "The bytes are not a video that can be read.",
            "Send the complete file, or another format such as MP4.",
            detail=type(error).__name__,
        ) from error
    return _clip(taken, index.total, fps, given)


def _animated(data: bytes, found: animation.Timeline, sampling: FrameSampling, limits: MediaLimits) -> Clip:
    """Decode the sampled frames of an animated image, each with the time at which it is shown.

    Frames may be shown for different times, so the clip counts in a unit in which all begin at whole numbers.
    """
    count, seconds = len(found.starts_ms), found.total_ms / 1000
    indices = sampling.indices(count, count / seconds)
    _check_count(len(indices), limits)
    _check_bytes(len(indices) * found.size[0] * found.size[1] * 3, limits)
    rate, starts, total = found.fine_rate()
    given = {"format": found.form, "width": found.size[0], "height": found.size[1]}
    shown = zip(indices, animation.frames(data, indices, limits), strict=False)
    clip = _clip(_stacked(shown, len(indices), limits), count, count / seconds, given)
    return replace(clip, total=total, fps=rate, indices=tuple(starts[index] for index in clip.indices or ()))


def _of_stills(data: bytes, limits: MediaLimits) -> Clip:
    """Decode single images, all of them: as with other frames, the caller chose them."""
    images = stills.images_of(data)
    _check_count(len(images), limits)
    width, height = stills.size_of(images, limits)
    _check_bytes(len(images) * width * height * 3, limits)
    _, frames = _stacked(enumerate(stills.frames(images, limits)), len(images), limits)
    return from_frames(frames, None, limits)


def _check_count(count: int, limits: MediaLimits) -> None:
    if count > limits.max_frames:
        raise LimitError(
            f"{count} frames of the video would be sampled; the limit is {limits.max_frames}.",
            "Cut it first.",
            or_engine="set num_frames or fps lower",
        )


def _stacked(found: Iterable[tuple[int, Any]], most: int, limits: MediaLimits) -> tuple[tuple[int, ...], Any]:
    """The indices of at most `most` frames, and their array (frames, height, width, 3).

    Each is copied when it comes: all of them together would take the memory of the array again.

    Raises:
        DecodeError: there are none, or they differ in size.
        LimitError: they take too many bytes.
    """
    import numpy as np

    ranks: list[int] = []
    array: Any = None
    for rank, frame in found:
        if array is None:
            _check_bytes(most * frame.nbytes, limits)
            array = np.empty((most, *frame.shape), frame.dtype)
        if frame.shape != array.shape[1:]:
            raise DecodeError("The frames of the video have different sizes.", "Scale them to one size first.")
        array[len(ranks)] = frame
        ranks.append(rank)
    if not ranks:
        raise DecodeError("The video has no frames that can be decoded.", "Send the complete file.")
    return tuple(ranks), array[: len(ranks)]


def _clip(taken: tuple[tuple[int, ...], Any], total: int, fps: float, given: Mapping[str, Any]) -> Clip:
    ranks, frames = taken
    known = {**given, "frames": total} | ({"fps": round(fps, 4), "seconds": round(total / fps, 3)} if fps > 0 else {})
    lost = (f"{total - len(ranks)} of {total} frames were not used",) if len(ranks) < total else ()
    return Clip(frames, total, fps or None, ranks, known, lost, from_file=True)


@dataclass(frozen=True)
class _Index:
    """What a stream's packets contain, without decoding: frames in presentation order.

    Attributes:
        total: number of frames.
        times: their presentation times, ascending; None if the container has none, so that seeking is impossible.
        keys: the frames that decode without others, ascending.
    """

    total: int
    times: tuple[int, ...] | None
    keys: tuple[int, ...]

    def num_decoded(self, indices: list[int]) -> int:
        """How many frames are decoded to have those at `indices`: each with all since the last one, or its key."""
        position = count = 0
        for target in indices:
            start = max(position, self.key_before(target))
            count += target + 1 - start
            position = target + 1
        return count

    def key_before(self, target: int) -> int:
        """The last frame up to `target` that decodes without others, and that can be sought; 0 if there is none."""
        if self.times is None or not self.keys or self.keys[0] > target:
            return 0
        return self.keys[bisect_right(self.keys, target) - 1]


def _index(container: Any, stream: Any) -> _Index:
    """Read all packets once, because headers misreport the number of frames."""
    times: list[int | None] = []
    keys: list[int] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        times.append(packet.pts)
        if packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)
        if len(times) > _MAX_PACKETS:
            raise LimitError(f"The video has more than {_MAX_PACKETS} frames.", "Cut it first.")
    if not times:
        raise DecodeError("The video is empty: it has 0 frames.", "Send the complete file.")
    container.seek(0, stream=stream, backward=True, any_frame=False)
    shown = sorted(time for time in times if time is not None)
    if len(set(shown)) != len(times):
        return _Index(len(times), None, ())
    return _Index(len(times), tuple(shown), tuple(bisect_left(shown, key) for key in sorted(keys)))


def _decode(
    container: Any, stream: Any, index: _Index, indices: list[int], limits: MediaLimits
) -> Iterator[tuple[int, Any]]:
    """Yield the frames at `indices` with their indices; seeks to a key frame before the next target if there is one."""
    last = -1
    frames = container.decode(stream)
    # The next frame from the decoder, counted because there are no times.
    position = 0
    for target in indices:
        if last >= target:
            continue
        if index.times is not None:
            key = index.key_before(target)
            if key > position:
                container.seek(index.times[key], stream=stream, backward=True)
                frames = container.decode(stream)
                position = key
        for frame in frames:
            rank = position if index.times is None or frame.pts is None else bisect_left(index.times, frame.pts)
            position = rank + 1
            # A decoder may skip a damaged frame; the next one takes its place.
            if rank >= target:
                yield rank, _rgb(frame, limits)
                last = rank
                break
        else:
            return


def _check_bytes(num_bytes: int, limits: MediaLimits) -> None:
    if num_bytes > limits.max_decoded_bytes:
        raise LimitError(
            f"The frames of the video take {num_bytes} bytes; the limit is {limits.max_decoded_bytes}.",
            "Cut or shrink it first.",
            or_engine="set num_frames or fps lower",
        )


def _rgb(frame: Any, limits: MediaLimits) -> Any:
    if frame.width * frame.height > limits.max_pixels:
        raise LimitError(
            f"A frame has {frame.width} x {frame.height} pixels; the limit is {limits.max_pixels}.", _SHRINK
        )
    return frame.to_ndarray(format="rgb24")


def from_frames(frames: Any, metadata: Mapping[str, Any] | None, limits: MediaLimits) -> Clip:
    """Return a clip from an array (frames, height, width, 3) of bytes, or from a list of images or arrays.

    Nothing is sampled here: the caller chose the frames.

    Args:
        frames: the frames.
        metadata: the caller's metadata: "fps", "total_num_frames", "frames_indices", "duration"; other keys are ignored
            only if their value is None. "frames_indices" must not decrease and must be below "total_num_frames".
        limits: on sizes.

    Raises:
        DecodeError: no frames, another shape or type, frames of different sizes, or inconsistent metadata.
        LimitError: too many frames or pixels.
    """
    import numpy as np

    array = frames if isinstance(frames, np.ndarray) else _stack(frames, limits)
    if array.ndim != 4 or array.shape[3] != 3:
        raise DecodeError(
            f"A video as an array must have the shape (frames, height, width, 3), not {tuple(array.shape)}.",
            "Bring it into that shape, and pass several videos as a list.",
        )
    if array.shape[0] == 0:
        raise DecodeError("The video is empty: it has 0 frames.", "Send at least one frame.")
    if array.shape[1] == 0 or array.shape[2] == 0:
        raise DecodeError(
            f"The frames of the video are empty: {array.shape[2]} x {array.shape[1]} pixels.", "Give at least 1 x 1."
        )
    if array.dtype != np.uint8:
        raise DecodeError(f"A video as an array must hold bytes (uint8), not {array.dtype}.", "Scale it to 0 to 255.")
    if array.shape[1] * array.shape[2] > limits.max_pixels:
        raise LimitError(
            f"A frame has {array.shape[2]} x {array.shape[1]} pixels; the limit is {limits.max_pixels}.", _SHRINK
        )
    if array.shape[0] > limits.max_frames:
        raise LimitError(
            f"The video has {array.shape[0]} frames; the limit is {limits.max_frames}.", "Sample it first."
        )
    given = {"width": array.shape[2], "height": array.shape[1], "frames": array.shape[0], "source": "frames"}
    clip = Clip(np.ascontiguousarray(array), array.shape[0], None, None, given)
    return clip if metadata is None else _with_metadata(clip, metadata)


def _stack(frames: Sequence[Any], limits: MediaLimits) -> Any:
    import numpy as np

    from beheld.inputs.media import decode

    if not frames:
        raise DecodeError("The video is empty: it has 0 frames.", "Send at least one frame.")
    if len(frames) > limits.max_frames:
        raise LimitError(f"The video has {len(frames)} frames; the limit is {limits.max_frames}.", "Sample it first.")

    def array_of(frame: Any) -> Any:
        if not decode.is_image(frame):
            return np.asarray(frame)
        with decode.alone_with(frame):
            return np.asarray(decode.from_pil(frame, limits).image)

    arrays = [array_of(frame) for frame in frames]
    if len({array.shape for array in arrays}) > 1:
        raise DecodeError("The frames of the video have different sizes.", "Bring them to one size first.")
    return np.stack(arrays)


_METADATA = frozenset(
    ("fps", "total_num_frames", "frames_indices", "duration", "width", "height", "video_backend", "do_sample_frames")
)


def _with_metadata(clip: Clip, metadata: Mapping[str, Any]) -> Clip:
    for name, value in metadata.items():
        if name not in _METADATA and value is not None:
            raise DecodeError(f"Unknown video metadata {name!r}.", nearest(str(name), _METADATA))
    fps = metadata.get("fps")
    total = metadata.get("total_num_frames")
    indices = metadata.get("frames_indices")
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not math.isfinite(fps) or fps <= 0
    ):
        raise DecodeError(
            f"The video's fps must be a number above 0, got {fps!r}.", "Leave it out if the rate is unknown."
        )
    if metadata.get("do_sample_frames"):
        # The caller lets the processor sample frames.
        indices = None
    if indices is not None:
        indices = _places(indices, clip.total)
    if total is None:
        total = clip.total if indices is None else max(clip.total, indices[-1] + 1)
    if isinstance(total, bool) or not isinstance(total, int) or total < clip.total:
        raise DecodeError(
            f"total_num_frames must be a whole number of at least {clip.total}, got {total!r}.",
            "Give the number of all frames of the whole video, or leave it out.",
        )
    if indices is not None and indices[-1] >= total:
        raise DecodeError(
            f"frames_indices contains {indices[-1]}, but total_num_frames is {total}.",
            "Count frames from 0 in the whole video, and set total_num_frames to its number of frames.",
        )
    given = {**clip.given, **({"fps": float(fps)} if fps else {}), "source_frames": total}
    return replace(clip, total=total, fps=float(fps) if fps else None, indices=indices, given=given)


def _places(indices: Any, count: int) -> tuple[int, ...]:
    """Check the indices of `count` frames in their video. One may repeat, because samplers pad with the last frame."""
    try:
        places = tuple(operator.index(place) for place in indices)
    except TypeError as error:
        raise DecodeError(
            f"frames_indices must be a list of whole numbers, got {indices!r}.", "Give one for each frame."
        ) from error
    if len(places) != count:
        raise DecodeError(f"frames_indices has {len(places)} entries for {count} frames.", "Give one index per frame.")
    if places[0] < 0 or any(later < earlier for earlier, later in pairwise(places)):
        raise DecodeError(
            "frames_indices must be 0 or above and must not decrease.",
            "Give the frames in presentation order, each with its index in the whole video.",
        )
    return places
