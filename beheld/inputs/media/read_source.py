"""Reads a user's media (a URL, a path, bytes, an image, an array) as a source with a digest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from beheld.core.errors import DecodeError, first_line
from beheld.core.media import MediaRef, item_name
from beheld.inputs.fetch.fetch import Fetched, FetchRules, fetch
from beheld.inputs.media import audio, decode, digest, video
from beheld.inputs.media.document import DocumentPage
from beheld.inputs.media.open_media import Source, plain_rgb
from beheld.inputs.media.processor import ItemProcessor
from beheld.utils.cancellation import CancelToken


@dataclass(frozen=True)
class ItemOrder:
    """One item to prepare, and its options.

    Attributes:
        ref: the user's media.
        index: its number among the request's items of its modality, from 0.
        options: processor options, all layers merged.
        setting: the setting in the prompt that changes its features.
        salt: callers with different salts share no items, so that timing reveals nothing about each other's.
        cancel: the request's.
        client: the request's.
    """

    ref: MediaRef
    index: int
    options: Mapping[str, Any]
    setting: str
    salt: bytes = b""
    cancel: CancelToken = field(default_factory=CancelToken, compare=False)
    client: str = ""

    @property
    def name(self) -> str:
        """Return its name in errors, such as "image 2"."""
        return item_name(self.ref.modality, self.index + 1)


class StageClock:
    """Milliseconds per stage."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the block's time to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, 1000 * (time.perf_counter() - begin))

    def add(self, name: str, milliseconds: float) -> None:
        """Add a time measured elsewhere to a stage."""
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + milliseconds

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Split a stage into parts measured elsewhere; the remainder is waiting time."""
        self.milliseconds[name] = max(0.0, self.milliseconds[name] - sum(parts.values()))
        for part, spent in parts.items():
            self.add(part, spent)


class SourceReader:
    """Reads users' media. Safe to use from several threads.

    Args:
        rules: what may be opened.
        processor: the model's processor, which may limit the frames of a video.
        io_options: modality -> decoding options ("video": {"num_frames": 32}).
    """

    def __init__(
        self, rules: FetchRules, processor: ItemProcessor, io_options: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._rules = rules
        self._processor = processor
        self._io_options = io_options

    def read(self, order: ItemOrder, clock: StageClock) -> Source:
        """Return the source of an item that is not embeddings.

        Raises:
            FetchError, DecodeError, LimitError, ParamsError: it cannot be read, or an option is wrong.
        """
        ref = order.ref
        given: Any = ref.source
        kind = "bytes"
        if isinstance(given, str | Path):
            with clock.stage("fetch"):
                fetched = fetch(given, ref.modality, self._rules)
            given, kind = fetched.data, fetched.source
        elif isinstance(given, Fetched):
            clock.add("fetch", given.milliseconds)
            given, kind = given.data, given.source
        if isinstance(given, DocumentPage):
            clock.add("fetch", given.milliseconds)
            return Source(given.origin, digest.of_page(given.digest, given.choice.key()), given.data, page=given.choice)
        if isinstance(given, bytes | bytearray):
            return self._encoded(order, bytes(given), kind, clock)
        with clock.stage("digest"):
            if ref.modality == "image":
                return self._on(self.background(order), self._image_source(given, clock))
            if ref.modality == "video":
                return self._video_source(given)
            return self._audio_source(given)

    def _encoded(self, order: ItemOrder, data: bytes, kind: str, clock: StageClock) -> Source:
        if not data:
            raise DecodeError("The item has 0 bytes.", "Send the complete file.")
        if len(data) > self._rules.limits.max_item_bytes:
            raise DecodeError(
                f"The item has {len(data)} bytes; the limit is {self._rules.limits.max_item_bytes}.",
                "Send a smaller file.",
            )
        if order.ref.modality == "image":
            decode.check_header(data, self._rules.limits)
        sampling = self.sampling(order) if order.ref.modality == "video" else None
        with clock.stage("digest"):
            how = f"{order.ref.modality} {sampling}"
            source = Source(kind, digest.of_bytes(data, how), data, sampling)
            return self._on(self.background(order), source) if order.ref.modality == "image" else source

    def background(self, order: ItemOrder) -> decode.Colour:
        """The colour that an image shows where it is transparent.

        Raises:
            ParamsError: the option is wrong.
        """
        given = order.options.get(decode.BACKGROUND)
        if given is None:
            given = self._io_options.get("image", {}).get(decode.BACKGROUND)
        return decode.WHITE if given is None else decode.background_of(given)

    def _on(self, background: decode.Colour, source: Source) -> Source:
        """The image on a background: it is another one, unless nothing of it is transparent."""
        if background == decode.WHITE or source.content is not None or source.borrowed or not source.digest:
            return source
        return replace(source, digest=digest.salted(source.digest, bytes(background)), background=background)

    def sampling(self, order: ItemOrder) -> video.FrameSampling:
        """Which frames of a video's file are wanted."""
        chosen = {"num_frames": min(video.DEFAULT_FRAMES, self._processor.max_frames() or video.DEFAULT_FRAMES)}
        options = dict(self._io_options.get("video", {}))
        if "fps" in options or order.options.get("fps") is not None:
            # A rate replaces the default number of frames.
            chosen.clear()
        chosen |= options
        for name in ("num_frames", "fps"):
            if order.options.get(name) is not None:
                chosen[name] = order.options[name]
        return video.FrameSampling.of(chosen).at_most(order.options.get("max_frames"))

    def _image_source(self, given: Any, clock: StageClock) -> Source:
        if decode.is_array(given):
            return Source("array", digest.of_array("image", given), given)
        if not decode.is_image(given):
            raise DecodeError(
                f"A {type(given).__name__} cannot be read as an image.",
                "Give a PIL image, an array, bytes or a path.",
            )
        if self._bad_size(given):
            # The decoder refuses it with a reason, before its pixels are read.
            return Source("PIL", b"", given)
        with clock.stage("decode"), decode.alone_with(given):
            try:
                given.load()
            except Exception as error:
                raise DecodeError(
                    "The image is broken.", "Send the complete file.", detail=first_line(error)
                ) from error
            plain = decode.is_plain_rgb(given)
            if not plain and not self._bad_size(given):
                return Source("PIL", digest.of_image(given), given)
        if self._bad_size(given):
            # Some files reveal their size only after loading.
            return Source("PIL", b"", given)
        return plain_rgb(given)

    def _bad_size(self, image: Any) -> bool:
        width, height = image.size
        return bool(width * height > self._rules.limits.max_pixels or min(width, height) < 1)

    def _video_source(self, given: Any) -> Source:
        frames, metadata = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if decode.is_tensor(frames):
            frames = frames.cpu().numpy()
        clip = video.from_frames(frames, metadata, self._rules.limits)
        extra = [clip.total, clip.fps, None if clip.indices is None else list(clip.indices)]
        return Source("frames", digest.of_array("video", clip.frames, extra), clip)

    def _audio_source(self, given: Any) -> Source:
        if not (isinstance(given, tuple) and len(given) == 2):
            raise DecodeError("Audio as an array needs its sampling rate.", "Give (samples, rate).")
        wave = audio.from_array(given[0], given[1], self._rules.limits)
        return Source("array", digest.of_array("audio", wave.samples, wave.rate), wave)
