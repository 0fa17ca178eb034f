"""The audio of videos: which item is which video's, and where it comes from, for models that read both as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from beheld.core.errors import DecodeError, ParamsError, PlaceholderError, rebuild
from beheld.core.media import AUDIO_IN_VIDEO, MediaReceipt, MediaRef, item_name
from beheld.inputs.fetch.fetch import Fetched
from beheld.inputs.media.processor_options import GROUPS

_PARAM = "mm_processor_kwargs"
_MARK = f'with "{AUDIO_IN_VIDEO[0]}": true directly after the video'


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return processor options without those of AUDIO_IN_VIDEO, and whether one of these is set.

    Raises:
        ParamsError: one is neither true nor false.
    """
    left, wanted = dict(options), False
    for group in (left, *(values for name, values in left.items() if name in GROUPS.values())):
        for name in AUDIO_IN_VIDEO:
            value = group.get(name) if isinstance(group, Mapping) else None
            if value is None:
                continue
            if not isinstance(value, bool):
                raise ParamsError(f"{name} must be true or false, got {value!r}.", param=_PARAM)
            wanted = wanted or value
    for name, values in options.items():
        if name in AUDIO_IN_VIDEO:
            del left[name]
        elif name in GROUPS.values() and isinstance(values, Mapping):
            left[name] = {key: value for key, value in values.items() if key not in AUDIO_IN_VIDEO}
    return left, wanted


def attached(media: Sequence[MediaRef], written: Sequence[str], *, wanted: bool) -> tuple[MediaRef, ...]:
    """Return the media with one audio item for each video, which has no placeholder of its own.

    Audio items without a placeholder belong to the videos. Videos and audio items are in the order of the placeholders:

        written   video  audio  video         audio items  a  b  c          a and c belong to the videos

    If all audio items have one, each video's audio is read from its own file.

    Args:
        media: the items; those that are marked as a video's audio stay so.
        written: the modalities of the prompt's placeholders, in order.
        wanted: whether the request's options ask for it.

    Raises:
        DecodeError: a video has no audio, or more than one item.
        PlaceholderError: the number of audio items is neither of the two.
    """
    videos = [ref for ref in media if ref.modality == "video"]
    marked = [ref.of_video for ref in media if ref.of_video is not None]
    if not videos or not (wanted or marked):
        return tuple(media)
    for index in set(marked):
        if marked.count(index) > 1:
            raise DecodeError(f"It has {marked.count(index)} audio items.", "Send one.", item=_name(index))
    without = [index for index in range(len(videos)) if index not in marked]
    if not wanted and without:
        raise DecodeError(
            "It has no audio, but another video of the prompt has.",
            f"Send audio for every video of a prompt, {_MARK}, or for none.",
            item=_name(without[0]),
        )
    places = written.count("audio")
    spare = sum(ref.modality == "audio" and ref.of_video is None for ref in media) - places
    if spare == 0 or not without or written.count("video") != len(videos):
        return (*media, *(_own(videos[index], index) for index in without))
    if spare != len(without):
        raise PlaceholderError(
            f"With {AUDIO_IN_VIDEO[0]}, {len(without)} videos and {places} placeholders of audio take {places} audio "
            f"items, or {len(without) + places} if the videos' files have no audio; {spare + places} were given.",
            "Give one for each, in the order of the prompt.",
        )
    owners: list[int | None] = []
    number = 0
    for modality in written:
        if modality == "audio":
            owners.append(None)
        elif modality == "video":
            owners += [number] if number in without else []
            number += 1
    waiting = iter(owners)
    return tuple(
        replace(ref, of_video=next(waiting)) if ref.modality == "audio" and ref.of_video is None else ref
        for ref in media
    )


def _name(index: int) -> str:
    return item_name("video", index + 1)


def _own(video: MediaRef, index: int) -> MediaRef:
    """Return the audio of a video's file, which is not opened twice: its source is filled in by `resolved`.

    Raises:
        DecodeError: the video is no file.
    """
    if not isinstance(video.source, str | Path | bytes | bytearray | Fetched):
        how = 'Give it under multi_modal_data["audio"]' if video.place is None else f"Send it in a part {_MARK}"
        raise DecodeError(
            "It is given as frames, which have no audio.",
            f"{how}, or leave out {AUDIO_IN_VIDEO[0]}.",
            item=_name(index),
            param=video.place,
        )
    return MediaRef("audio", None, place=video.place, of_video=index)


def resolved(media: Sequence[MediaRef]) -> tuple[MediaRef, ...]:
    """Return the media, where the audio of a video's own file has the file as its source."""
    files = [ref.source for ref in media if ref.modality == "video"]
    return tuple(
        replace(ref, source=files[ref.of_video])
        if ref.of_video is not None and ref.source is None and ref.uuid is None
        else ref
        for ref in media
    )


def unread(error: DecodeError, index: int) -> DecodeError:
    """Return the error of a video's audio that cannot be decoded, which names the video."""
    reason, remedy, stage, param, item, detail, or_engine = error.arguments()
    return rebuild(
        type(error),
        f"The audio of {_name(index)} cannot be read: {reason}",
        f"{remedy} Or leave out {AUDIO_IN_VIDEO[0]}: only its frames are read then.".lstrip(),
        stage,
        param,
        item,
        detail,
        or_engine,
    )


def receipts(video: MediaReceipt, audio: MediaReceipt) -> tuple[MediaReceipt, MediaReceipt]:
    """Return the two items' receipts, each with the other's name."""
    return (
        replace(video, used={**video.used, "interleaved_with": audio.item}),
        replace(audio, used={**audio.used, "interleaved_with": video.item}),
    )
