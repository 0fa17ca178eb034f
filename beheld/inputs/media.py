"""One item from what the user gave to what the model takes: fetch, decode, digest, look up, process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import BeheldError, DecodeError, EngineError, MediaLossError, ProcessError
from beheld.core.media import MediaItem, MediaReceipt, MediaRef
from beheld.inputs import audio, decode, digest, embeds, video
from beheld.inputs.cache import Content, MediaCache, Processed
from beheld.inputs.families import Family
from beheld.inputs.fetch import FetchRules, fetch
from beheld.inputs.processor import ItemProcessor, Job


@dataclass(frozen=True)
class Task:
    """One item to prepare.

    Attributes:
        ref: what the user gave.
        name: as messages name it, "image 2".
        options: processor options, all layers merged.
        setting: what of its surroundings changes its features.
    """

    ref: MediaRef
    name: str
    options: Mapping[str, Any]
    setting: str


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared item and its receipt (whose index is the caller's to set)."""

    item: MediaItem
    receipt: MediaReceipt


@dataclass(frozen=True, eq=False)
class _Source:
    """What came in: its kind in a word, its digest, and how to open it."""

    kind: str
    digest: bytes
    payload: Any
    sampling: video.Sampling | None = None


class _Clock:
    """Milliseconds per stage."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = 1000 * (time.perf_counter() - begin)
            self.milliseconds[name] = self.milliseconds.get(name, 0.0) + spent


class ItemMaker:
    """Prepares items. Safe to use from several threads.

    Args:
        info: the model.
        processor: the model's processor.
        family: its family.
        cache: processed items.
        rules: what may be opened.
        io_options: modality -> how to decode ("video": {"num_frames": 32}).
        strict: raise where anything would be lost.
    """

    def __init__(
        self,
        info: ModelInfo,
        processor: ItemProcessor,
        family: Family,
        cache: MediaCache,
        rules: FetchRules,
        io_options: Mapping[str, Mapping[str, Any]],
        *,
        strict: bool,
    ) -> None:
        self._info = info
        self._processor = processor
        self._family = family
        self._cache = cache
        self._rules = rules
        self._io_options = io_options
        self._strict = strict

    @property
    def _limits(self) -> MediaLimits:
        return self._rules.limits

    def make(self, task: Task) -> Prepared:
        """Prepare one item.

        Raises:
            MediaError, ParamsError: with the item's name.
        """
        try:
            return self._make(task)
        except BeheldError as error:
            if isinstance(error, EngineError):
                raise
            error_type = type(error)
            raise error_type(
                error.reason, error.remedy, stage=error.stage, param=error.param, item=error.item or task.name
            ) from error
        except Exception as error:
            raise ProcessError(
                f"The {task.ref.modality} could not be prepared ({type(error).__name__}: {error}).",
                "Check the file, or send another.",
                item=task.name,
            ) from error

    def _make(self, task: Task) -> Prepared:
        clock = _Clock()
        ref = task.ref
        if isinstance(ref.source, embeds.Embeddings) or embeds.given(ref.source):
            return self._from_embeddings(task, clock)
        source = self._source(task, clock)
        content = self._cache.content(source.digest)
        opened: Any = None
        if content is None:
            opened, content = self._open(task, source, clock)
            self._cache.remember(source.digest, content)
        options = self._options(task)
        item_digest = digest.of_item(content.digest, ref.modality, self._processor.identity(), options, task.setting)
        processed = self._cache.get(item_digest)
        cached = processed is not None
        if processed is None:
            if opened is None:
                opened, content = self._open(task, source, clock)
            with clock.stage("load"):
                self._processor.loaded()
            with clock.stage("process"):
                own = self._processor.options(ref.modality, options)
                processed = self._processor.process(Job(ref.modality, opened, item_digest, own, task.setting))
            self._cache.put(processed)
        return self._finish(task, source.kind, content, processed, clock, cached=cached)

    def _options(self, task: Task) -> Mapping[str, Any]:
        """What decides the features. Names are checked where an item is made, so a cached one needs no processor."""
        options = dict(task.options)
        if task.ref.modality == "video" and _is_encoded(task.ref.source):
            # These chose the frames already.
            options.pop("num_frames", None)
            options.pop("fps", None)
        return options

    # ------------------------------------------------------------------ opening

    def _source(self, task: Task, clock: _Clock) -> _Source:
        ref = task.ref
        given, kind = ref.source, "bytes"
        if isinstance(given, str | Path):
            with clock.stage("fetch"):
                fetched = fetch(given, ref.modality, self._rules)
            given, kind = fetched.data, fetched.source
        if isinstance(given, bytes | bytearray):
            return self._encoded(task, bytes(given), kind, clock)
        with clock.stage("digest"):
            if ref.modality == "image":
                return self._image_source(given, clock)
            if ref.modality == "video":
                return self._video_source(given)
            return self._audio_source(given)

    def _encoded(self, task: Task, data: bytes, kind: str, clock: _Clock) -> _Source:
        if not data:
            raise DecodeError("There are 0 bytes.")
        if len(data) > self._limits.max_item_bytes:
            raise DecodeError(f"There are {len(data)} bytes; the limit is {self._limits.max_item_bytes}.")
        sampling = self._sampling(task) if task.ref.modality == "video" else None
        with clock.stage("digest"):
            how = f"{task.ref.modality} {sampling}"
            return _Source(kind, digest.of_bytes(data, how), data, sampling)

    def _sampling(self, task: Task) -> video.Sampling:
        chosen = {"num_frames": min(video.DEFAULT_FRAMES, self._processor.max_frames() or video.DEFAULT_FRAMES)}
        said = dict(self._io_options.get("video", {}))
        if "fps" in said or task.options.get("fps") is not None:
            # A rate of its own replaces the default number of frames.
            chosen.clear()
        chosen |= said
        for name in ("num_frames", "fps"):
            if task.options.get(name) is not None:
                chosen[name] = task.options[name]
        return video.Sampling.of(chosen)

    def _image_source(self, given: Any, clock: _Clock) -> _Source:
        if decode.is_array(given):
            return _Source("array", digest.of_array("image", given), given)
        if not decode.is_picture(given):
            raise DecodeError(
                f"A {type(given).__name__} cannot be read as a picture.",
                "Give a PIL picture, an array, bytes or a path.",
            )
        width, height = given.size
        if width * height > self._limits.max_pixels or min(width, height) < 1:
            # Refused with its reason by the decoder, before its pixels are touched.
            return _Source("PIL", b"", given)
        with clock.stage("decode"):
            try:
                given.load()
            except Exception as error:
                raise DecodeError(f"The picture is broken: {error}.", "Send it again, complete.") from error
        if decode.is_plain_rgb(given):
            return _Source("PIL", digest.of_rgb(width, height, given.tobytes()), given)
        return _Source("PIL", digest.of_picture(given), given)

    def _video_source(self, given: Any) -> _Source:
        frames, metadata = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if decode.is_tensor(frames):
            frames = frames.cpu().numpy()
        clip = video.from_frames(frames, metadata, self._limits)
        extra = [clip.total, clip.fps, None if clip.indices is None else list(clip.indices)]
        return _Source("frames", digest.of_array("video", clip.frames, extra), clip)

    def _audio_source(self, given: Any) -> _Source:
        if not (isinstance(given, tuple) and len(given) == 2):
            raise DecodeError("A sound as an array needs its sampling rate.", "Give (samples, rate).")
        wave = audio.from_array(given[0], given[1], self._limits)
        return _Source("array", digest.of_array("audio", wave.samples, wave.rate), wave)

    def _open(self, task: Task, source: _Source, clock: _Clock) -> tuple[Any, Content]:
        """The decoded content, and what is to be remembered of it."""
        modality, payload = task.ref.modality, source.payload
        with clock.stage("decode"):
            if modality == "image":
                return self._open_image(source)
            if modality == "video":
                clip = payload
                if isinstance(payload, bytes):
                    assert source.sampling is not None
                    clip = video.open_bytes(payload, source.sampling, self._limits)
                return clip, Content(source.digest, clip.given, clip.lost)
            wave = audio.open_bytes(payload, self._limits) if isinstance(payload, bytes) else payload
            wave = audio.resampled(wave, self._processor.rate())
            return wave, Content(source.digest, wave.given, wave.lost)

    def _open_image(self, source: _Source) -> tuple[Any, Content]:
        payload = source.payload
        if isinstance(payload, bytes):
            picture = decode.open_bytes(payload, self._limits)
        elif decode.is_picture(payload):
            picture = decode.from_pil(payload, self._limits, getattr(payload, "format", None))
        else:
            picture = decode.from_array(payload, self._limits)
        rgb = picture.image
        key = source.digest
        if rgb is not payload:
            key = digest.of_rgb(rgb.width, rgb.height, rgb.tobytes())
        return rgb, Content(key, {**picture.given, **picture.treated}, picture.lost)

    # ------------------------------------------------------------------ ending

    def _from_embeddings(self, task: Task, clock: _Clock) -> Prepared:
        ref = task.ref
        found = [ref.source]
        if not isinstance(ref.source, embeds.Embeddings):
            found = list(embeds.split(ref.source, ref.modality, self._info, merge_size(self._info)))
        if len(found) != 1:
            raise DecodeError(f"One part holds the embeddings of {len(found)} items.", "Give one item per part.")
        with clock.stage("digest"):
            item = embeds.to_item(found[0], ref.modality, self._info.placeholder_ids[ref.modality])
        given = {"source": "embeddings", "shape": list(found[0].tensor.shape)}
        processed = Processed(item, {"embeddings": item.num_embeds}, ())
        return self._finish(task, "embeddings", Content(item.digest, given, ()), processed, clock, cached=False)

    def _finish(
        self, task: Task, kind: str, content: Content, processed: Processed, clock: _Clock, *, cached: bool
    ) -> Prepared:
        lost = (*content.lost, *processed.lost)
        if lost and self._strict:
            raise MediaLossError(
                f"strict_media is set, and {'; '.join(lost)}.", "Bring it into a form that needs no loss."
            )
        given = {**content.given, "source": kind}
        if task.ref.uuid is not None:
            given["uuid"] = task.ref.uuid
        treated = {"exif_rotated": given.pop("exif_rotated")} if "exif_rotated" in given else {}
        receipt = MediaReceipt(
            modality=task.ref.modality,
            index=0,
            given=given,
            used={**processed.used, **treated},
            lost=lost,
            tokens=len(processed.item.replacement_ids),
            cached=cached,
            milliseconds=clock.milliseconds,
            digest=processed.item.digest.hex(),
        )
        return Prepared(processed.item, receipt)


def _is_encoded(source: Any) -> bool:
    return isinstance(source, str | Path | bytes | bytearray)


def merge_size(info: ModelInfo) -> int:
    """Patches per embedding along each side, for families with a grid; 1 for others."""
    from beheld.checkpoint.resolve import CONFIG, read_json

    vision = read_json(Path(info.path) / CONFIG).get("vision_config") or {}
    value = vision.get("spatial_merge_size") if isinstance(vision, Mapping) else None
    return value if isinstance(value, int) and value > 0 else (2 if info.position_axes > 1 else 1)


def indexed(prepared: Prepared, index: int) -> MediaReceipt:
    """The receipt with its place in the request."""
    return replace(prepared.receipt, index=index)
