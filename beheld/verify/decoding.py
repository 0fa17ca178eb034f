"""Decodes a question's files as transformers does: frames of videos, samples of audio."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from beheld.core.config import EngineArgs
from beheld.core.errors import first_line
from beheld.inputs.media.video import DEFAULT_FRAMES
from beheld.verify.trace import Question, Trace


def by_transformers(question: Question, args: EngineArgs, made: Trace) -> Question:
    """Return the question with transformers' decoded files; results and failures are recorded in `made`.

    Files that transformers cannot read here keep what beheld decoded.
    """
    options = (args.media_io_kwargs or {}).get("video", {})
    videos = _read("video", question, made, lambda path, _: _video(path, options))
    audios = _read("audio", question, made, lambda path, own: (_samples(path, own[1]), own[1]))
    return dataclasses.replace(question, videos=videos, audios=audios)


def note(question: Question, made: Trace) -> None:
    """Record in `made` what beheld decoded from the question's files."""
    for kind in question.files:
        made.decoded[kind] = [torch.as_tensor(content) for content, _ in question.media[kind]]


def _read(kind: str, question: Question, made: Trace, read: Callable[[Path, Any], Any]) -> tuple[Any, ...]:
    """Return all items of a kind, those with files decoded by `read`."""
    given = tuple(question.media.get(kind, ()))
    files = question.files.get(kind)
    if files is None:
        return given
    try:
        items = tuple(own if path is None else read(path, own) for path, own in zip(files, given, strict=True))
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, IndexError) as error:
        made.undecoded[kind] = f"transformers cannot read it: {first_line(error)}"
        return given
    made.decoded[kind] = [torch.as_tensor(content) for content, _ in items]
    return items


def _video(path: Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return frames (F, height, width, 3) and metadata by transformers' reader, which decodes from the start."""
    from transformers.video_utils import load_video

    source: Any = str(path)
    frames, known = load_video(
        source, backend="pyav", sample_indices_fn=lambda metadata, **_: _chosen(metadata, options)
    )
    indices = [int(index) for index in known.frames_indices]
    about = {"total_num_frames": known.total_num_frames, "fps": known.fps, "duration": known.duration}
    return frames, about | {"frames_indices": indices}


def _chosen(metadata: Any, options: Mapping[str, Any]) -> list[int]:
    """Apply media_io_kwargs["video"] as documented: at most num_frames, including first and last, or fps per second."""
    total, fps = metadata.total_num_frames, options.get("fps")
    if not total:
        raise ValueError("the file does not state its number of frames")
    most = options.get("num_frames", DEFAULT_FRAMES if fps is None else -1)
    wanted = total if most == -1 else min(most, total)
    if fps is not None and metadata.fps:
        wanted = min(wanted, max(1, math.floor(total / metadata.fps * fps)))
    return [0] if wanted == 1 else [place * (total - 1) // (wanted - 1) for place in range(wanted)]


def _samples(path: Path, rate: int) -> Any:
    """Return mono samples (N) at `rate` Hz by transformers' reader."""
    from transformers.audio_utils import load_audio

    return load_audio(str(path), sampling_rate=rate)
