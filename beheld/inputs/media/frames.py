"""Selects the frames of a clip that the video processor receives, and their metadata.

If the processor samples the frames, its rule is called before the processor. So it is known which frames the model
sees, their times, which options had no effect, and why frames cannot be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beheld.core.errors import ParamsError, ProcessError, first_line
from beheld.inputs.media.video import Clip, FrameSampling

# Options by which a processor samples frames.
_CHOOSING = ("num_frames", "min_frames", "fps")
# Alternative options; a processor's default for one must not conflict with the other.
_EXCLUSIVE = ("num_frames", "fps")
# Unlikely values that reveal whether a rule depends on an option.
_PROBES: Mapping[str, Callable[[int], float]] = {
    "num_frames": lambda count: 1,
    "min_frames": lambda count: count,
    "fps": lambda count: 0.001,
}
# As with files, this number of frames means all of them.
_ALL = -1
# What sampling rules raise when they cannot sample; some compute with settings that are missing.
_REFUSALS = (ValueError, TypeError, ArithmeticError)
# Outputs with the seconds per step of frames.
_SECONDS_OF_STEPS = ("second_per_grid_ts", "second_per_grids")
_GIVE_TIMES = 'Give (frames, {"fps": their number per second}) in place of the frames.'

# (options) -> merged with the processor's defaults, see processor_options.arguments.
Merge = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Shown:
    """A clip as the processor receives it.

    Attributes:
        clip: the sampled frames, with their indices; its rate may be assumed.
        arguments: of the call, with the frames' metadata.
        metadata: part of the arguments, in transformers' class; a processor writes its assumptions into it.
        chosen: whether the processor's rule sampled the frames; otherwise they are used as given.
        idle: names of options without effect.
        assumed: whether the rate was unknown.
    """

    clip: Clip
    arguments: Mapping[str, Any]
    metadata: Any
    chosen: bool
    idle: tuple[str, ...]
    assumed: bool

    def timed(self, outputs: Mapping[str, Any], part: Any) -> Clip:
        """Return the clip with the rate in `outputs` of `part`; without a rate if they contain none."""
        if not self.assumed:
            return self.clip
        rate = self.metadata.fps
        for name in _SECONDS_OF_STEPS:
            if rate is None and name in outputs:
                rate = part.temporal_patch_size / float(outputs[name][0])
        return replace(self.clip, fps=None if rate is None else float(rate))


def check(options: Mapping[str, Any]) -> None:
    """Refuse meaningless numbers of frames and rates; transformers only checks their types.

    Raises:
        ParamsError: one is out of range.
    """
    try:
        FrameSampling.of({name: options[name] for name in _EXCLUSIVE if options.get(name) is not None})
    except ParamsError as error:
        raise ParamsError(error.reason, error.remedy, param="mm_processor_kwargs") from error


def shown(clip: Clip, options: Mapping[str, Any], part: Any, merge: Merge, rule: Callable[[Any], float] | str) -> Shown:
    """Sample the frames of a clip as `part` would, and attach the known metadata.

    Sampling options have no effect on frames that are used as given. That is allowed: an engine may set them for all
    videos, of which only some are still to be sampled.

    Args:
        clip: the given frames.
        options: of the call, already checked.
        part: the video processor.
        merge: merges options with the processor's defaults.
        rule: see FamilyInputs.frame_rate.

    Raises:
        ProcessError: `part` cannot sample, or the frames need times that are unknown.
    """
    assumed = clip.fps is None
    clip = _rated(clip, options, part, rule)
    # A file's frames were sampled during decoding; a user who gives frame indices has sampled them.
    settled = clip.from_file or (clip.indices is not None and "do_sample_frames" not in options)
    chosen = not settled and _samples(part, options) and options.get("num_frames") != _ALL
    if chosen:
        choice = _Choice(clip, part, merge, options)
        clip = choice.made()
        idle = choice.idle()
    else:
        if clip.fps is None and options.get("fps") is not None:
            # It can only mean their rate.
            clip, assumed = replace(clip, fps=float(options["fps"])), False
            options = _without(options, ("fps",))
        idle = tuple(name for name in _CHOOSING if options.get(name) is not None)
        if clip.from_file and options.get("do_sample_frames"):
            idle = ("do_sample_frames", *idle)
        options = _without(options, idle)
    metadata = _metadata(clip)
    given = {"video_metadata": [metadata], "do_sample_frames": False}
    return Shown(clip, merge(options) | given, metadata, chosen, idle, assumed)


def _samples(part: Any, options: Mapping[str, Any]) -> bool:
    return bool(options.get("do_sample_frames", getattr(part, "do_sample_frames", False)))


def _rated(clip: Clip, options: Mapping[str, Any], part: Any, rule: Callable[[Any], float] | str) -> Clip:
    """Return frames without times, with the rate that their family assumes."""
    if clip.fps is not None or not rule or not _samples(part, options):
        return clip
    if isinstance(rule, str) or options.get("fps") is not None:
        why = rule if isinstance(rule, str) else "frames cannot be sampled by a rate without their times"
        raise ProcessError(f"The times of the video's frames are unknown, and {why}.", _GIVE_TIMES)
    return replace(clip, fps=rule(part), indices=_places(clip))


def _places(clip: Clip) -> tuple[int, ...]:
    return tuple(range(len(clip.frames))) if clip.indices is None else clip.indices


def _without(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


class _Choice:
    """The processor's rule applied to the given frames, by the options."""

    def __init__(self, clip: Clip, part: Any, merge: Merge, options: Mapping[str, Any]) -> None:
        self._clip, self._part, self._merge, self._options = clip, part, merge, options

    def made(self) -> Clip:
        """Return the clip of the sampled frames.

        Raises:
            ProcessError: these options allow none.
        """
        try:
            taken, rate = self._asked(self._options)
        except _REFUSALS as error:
            raise self._refusal(error) from error
        places = _places(self._clip)
        fps = rate if self._clip.fps is None else self._clip.fps
        return replace(
            self._clip, frames=self._clip.frames[list(taken)], fps=fps, indices=tuple(places[index] for index in taken)
        )

    def idle(self) -> tuple[str, ...]:
        """Return the options that do not change which frames are sampled, whatever their value."""
        own = self._outcome(self._options)
        return tuple(
            name
            for name in _CHOOSING
            if self._options.get(name) is not None
            and own == self._outcome(_without(self._options, (name,)))
            and own == self._outcome({**self._options, name: _PROBES[name](len(self._clip.frames))})
        )

    def _outcome(self, options: Mapping[str, Any]) -> tuple[tuple[int, ...], float | None] | None:
        try:
            return self._asked(options)
        except _REFUSALS:
            return None

    def _asked(self, options: Mapping[str, Any]) -> tuple[tuple[int, ...], float | None]:
        """Return the indices of sampled frames among the given ones, and the rate that the rule assumed."""
        count, settings = len(self._clip.frames), self._settings(options)
        about = _metadata(self._at_hand())
        try:
            taken = tuple(int(index) for index in self._part.sample_frames(metadata=about, **settings))
        except ValueError:
            both = all(options.get(name) is not None for name in _EXCLUSIVE)
            most = settings["num_frames"] or getattr(self._part, "num_frames", None)
            if both or most is None or most <= count:
                raise
            # An upper bound, as for files: with fewer frames there is nothing to sample.
            taken = tuple(range(count))
        if not taken:
            raise ValueError("no frame would remain")
        return taken, about.fps

    def _settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rule's arguments: the options, and the processor's defaults for the others."""
        count, settings = len(self._clip.frames), self._merge(_without(options, ("do_sample_frames",)))
        for name in getattr(self._part.valid_kwargs, "__annotations__", {}):
            settings.setdefault(name, getattr(self._part, name, None))
        for name, other in zip(_EXCLUSIVE, reversed(_EXCLUSIVE), strict=True):
            if options.get(name) is not None and options.get(other) is None:
                settings[other] = None
        # Some rules allocate a list of the requested length before they check the clip.
        most = {"num_frames": max(count, getattr(self._part, "num_frames", None) or 0), "fps": self._at_hand().fps}
        for name, bound in most.items():
            if options.get(name) is not None and bound is not None:
                settings[name] = min(options[name], bound)
        for name in ("metadata", "video_metadata", "do_sample_frames"):
            settings.pop(name, None)
        return settings

    def _at_hand(self) -> Clip:
        """Return the clip as if its frames were the whole video, at their rate."""
        count, rate = len(self._clip.frames), self._clip.fps
        if rate is not None and self._clip.indices is not None:
            rate *= count / self._clip.total
        return replace(self._clip, total=count, fps=rate, indices=None)

    def _refusal(self, error: Exception) -> ProcessError:
        """Explain why the frames cannot be sampled, and what helps."""
        given = [name for name in _EXCLUSIVE if self._options.get(name) is not None]
        if len(given) > 1 and any(self._outcome(_without(self._options, (name,))) for name in given):
            return ProcessError("num_frames and fps both set the number of frames to sample.", "Give one of them.")
        reason = f"The processor of this model cannot sample the {len(self._clip.frames)} frames of the video."
        if self._clip.fps is None and self._options.get("num_frames") is None:
            remedy = f"{_GIVE_TIMES} Or set num_frames."
        else:
            other = "another num_frames or fps" if given else "num_frames or fps"
            remedy = f'Give {other}; or have all of them taken, with "do_sample_frames": false.'
        return ProcessError(reason, remedy, detail=first_line(error))


def _metadata(clip: Clip) -> Any:
    """Return a clip's metadata in transformers' class."""
    from transformers.video_utils import VideoMetadata

    # Only the user knows their indices in the whole video.
    known = clip.indices is not None or clip.total == len(clip.frames)
    return VideoMetadata(
        total_num_frames=clip.total,
        fps=clip.fps,
        width=clip.frames.shape[2],
        height=clip.frames.shape[1],
        duration=clip.total / clip.fps if clip.fps else None,
        frames_indices=list(_places(clip)) if known else None,
    )
