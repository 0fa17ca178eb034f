"""One item from what the user gave to what the model takes: fetch, decode, digest, look up, process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from beheld.core.config import MediaLimits, ModelInfo
from beheld.core.errors import (
    BeheldError,
    DecodeError,
    EngineError,
    LimitError,
    MediaLossError,
    ParamsError,
    WorkerError,
    first_line,
)
from beheld.core.media import MediaItem, MediaReceipt, MediaRef, item_name
from beheld.families.inputs import FamilyInputs
from beheld.inputs.fetch.fetch import Fetched, FetchRules, fetch
from beheld.inputs.media import audio, decode, digest, embeds, header, video
from beheld.inputs.media.cache import Content, MediaCache, Processed
from beheld.inputs.media.memory_gate import Gate
from beheld.inputs.media.open_media import Source, plain_rgb, taken, unpacked
from beheld.inputs.media.processor import ItemProcessor, Job
from beheld.inputs.media.tasks import Make
from beheld.inputs.media.workers import Workers
from beheld.utils.cancellation import Departure
from beheld.utils.gil import in_turn

_UNKNOWN_BYTES = 128 << 20


@dataclass(frozen=True)
class Task:
    """One item to prepare.

    Attributes:
        ref: what the user gave.
        index: its place among the request's items of its modality, counted from 0.
        options: processor options, all layers merged.
        setting: what of its surroundings changes its features.
        salt: callers with different ones share no item, and see nothing of each other's in the time that theirs take.
        departure: of whoever asked.
    """

    ref: MediaRef
    index: int
    options: Mapping[str, Any]
    setting: str
    salt: bytes = b""
    departure: Departure = field(default_factory=Departure, compare=False)

    @property
    def name(self) -> str:
        """As errors name it, "image 2"."""
        return item_name(self.ref.modality, self.index + 1)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared item and its receipt."""

    item: MediaItem
    receipt: MediaReceipt


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

    def took(self, name: str, milliseconds: float) -> None:
        """A stage that came before."""
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + milliseconds

    def told(self, name: str, parts: Mapping[str, float]) -> None:
        """Parts of a stage that were measured elsewhere; what is left of it was waiting."""
        self.milliseconds[name] = max(0.0, self.milliseconds[name] - sum(parts.values()))
        for part, spent in parts.items():
            self.milliseconds[part] = self.milliseconds.get(part, 0.0) + spent


class ItemMaker:
    """Prepares items. Safe to use from several threads.

    Args:
        info: the model.
        processor: the model's processor.
        family: its family.
        cache: processed items.
        rules: what may be opened.
        workers: where it is opened and processed.
        io_options: modality -> how to decode ("video": {"num_frames": 32}).
        strict: raise where anything would be lost.
    """

    def __init__(
        self,
        info: ModelInfo,
        processor: ItemProcessor,
        family: FamilyInputs,
        cache: MediaCache,
        rules: FetchRules,
        workers: Workers,
        io_options: Mapping[str, Mapping[str, Any]],
        *,
        strict: bool,
    ) -> None:
        self._info = info
        self._processor = processor
        self._family = family
        self._cache = cache
        self._rules = rules
        self._workers = workers
        self._io_options = io_options
        # Workers that process too have bounds of their own.
        self._gate = Gate(rules.limits.max_decoded_bytes)
        self._strict = strict

    @property
    def _limits(self) -> MediaLimits:
        return self._rules.limits

    def make(self, task: Task) -> Prepared:
        """Prepare one item.

        Raises:
            MediaError, ParamsError, WorkerError: with the item's name.
            Departed: nobody waits for it any more.
        """
        task.departure.check()
        try:
            return self._make(task)
        except ParamsError as error:
            if task.ref.options and task.ref.place is not None:
                # They stand in the item's own part, beside it.
                reason, remedy, detail = error.reason, error.remedy, error.detail
                raise ParamsError(
                    reason, remedy, param=task.ref.place.rpartition(".")[0], item=task.name, detail=detail
                ) from error
            raise error.of(task.name) from error
        except BeheldError as error:
            if isinstance(error, EngineError) and not isinstance(error, WorkerError):
                raise
            raise error.of(task.name, task.ref.place) from error
        except MemoryError as error:
            reason = f"Preparing the {task.ref.modality} took more memory than there is."
            raise LimitError(reason, "Send a smaller one.", item=task.name, param=task.ref.place) from error
        except Exception as error:
            # Nobody knows who is at fault. What content may do to libraries is told where they are asked.
            error.add_note(f"While {task.name} was prepared.")
            raise

    def _make(self, task: Task) -> Prepared:
        clock = _Clock()
        ref = task.ref
        if isinstance(ref.source, embeds.Embeddings) or embeds.given(ref.source):
            return self._from_embeddings(task, clock)
        source = _salted(task, self._source(task, clock))
        content, processed = self._found(task, source)
        if processed is None and source.borrowed:
            with clock.stage("digest"):
                source = _salted(task, taken(source))
            content, processed = self._found(task, source)
        cached = processed is not None
        if content is None or processed is None:
            make = self._made_elsewhere if self._workers.process_too else self._made_here
            content, processed, cached = make(task, source, clock)
        return self._finish(task, source.kind, content, processed, clock, cached=cached)

    def _digest(self, task: Task, content: Content) -> bytes:
        identity, options = self._processor.identity(), self._options(task)
        try:
            key = digest.of_item(content.digest, task.ref.modality, identity, options, task.setting)
        except TypeError as error:
            raise ParamsError(
                "The processor's options hold a value that no option has.",
                "Give numbers, texts, lists and mappings of them.",
                param="mm_processor_kwargs",
                detail=first_line(error),
            ) from error
        return digest.salted(key, task.salt)

    def _found(self, task: Task, source: Source) -> tuple[Content | None, Processed | None]:
        """What is remembered of a source, and what was made of it."""
        content = self._cache.content(source.digest)
        return content, None if content is None else self._known(task, content)

    def _known(self, task: Task, content: Content) -> Processed | None:
        return self._cache.get(self._digest(task, content))

    def _made_here(self, task: Task, source: Source, clock: _Clock) -> tuple[Content, Processed, bool]:
        """Opened, looked up, and processed in this process; True if the cache held it."""
        modality = task.ref.modality
        with self._gate.within(_opened_bytes(modality, source.payload), task.departure):
            return self._made_inside(task, source, clock)

    def _made_inside(self, task: Task, source: Source, clock: _Clock) -> tuple[Content, Processed, bool]:
        modality = task.ref.modality
        with clock.stage("decode"):
            opened, content = self._workers.open(modality, source, self._processor.rate, task.departure)
        self._cache.remember(source.digest, content)
        known = self._known(task, content)
        if known is not None:
            return content, known, True
        # What is processed here cannot be stopped.
        task.departure.check()
        with clock.stage("load"):
            self._processor.loaded()
        with clock.stage("process"):
            own = self._processor.options(modality, self._options(task))
            # Pixels of bytes are let go of as soon as they are a picture; a source that came open holds its own.
            opened = unpacked(opened)
            job = Job(modality, opened, self._digest(task, content), own, task.setting)
            processed = self._processor.process(job)
        self._cache.put(processed)
        return content, processed, False

    def _made_elsewhere(self, task: Task, source: Source, clock: _Clock) -> tuple[Content, Processed, bool]:
        """Opened and processed by a worker at one go; True if the cache turned out to hold it."""
        with clock.stage("wait"):
            made = self._workers.make(
                Make(task.ref.modality, source, self._options(task), task.setting, task.salt),
                self._processor.rate,
                task.departure,
            )
        clock.told("wait", made.milliseconds)
        self._cache.remember(source.digest, made.content)
        known = self._known(task, made.content)
        if known is not None:
            return made.content, known, True
        self._cache.put(made.processed)
        return made.content, made.processed, False

    def _options(self, task: Task) -> Mapping[str, Any]:
        """What decides the features. Names are checked where an item is made, so a cached one needs no processor."""
        options = dict(task.options)
        if task.ref.modality == "video" and _is_encoded(task.ref.source):
            # These chose the frames already.
            options.pop("num_frames", None)
            options.pop("fps", None)
        return options

    # ------------------------------------------------------------------ opening

    def _source(self, task: Task, clock: _Clock) -> Source:
        ref = task.ref
        given: Any = ref.source
        kind = "bytes"
        if isinstance(given, str | Path):
            with clock.stage("fetch"):
                fetched = fetch(given, ref.modality, self._rules)
            given, kind = fetched.data, fetched.source
        elif isinstance(given, Fetched):
            clock.took("fetch", given.milliseconds)
            given, kind = given.data, given.source
        if isinstance(given, bytes | bytearray):
            return self._encoded(task, bytes(given), kind, clock)
        with clock.stage("digest"):
            if ref.modality == "image":
                return self._image_source(given, clock)
            if ref.modality == "video":
                return self._video_source(given)
            return self._audio_source(given)

    def _encoded(self, task: Task, data: bytes, kind: str, clock: _Clock) -> Source:
        if not data:
            raise DecodeError("There are 0 bytes.", "Give those of a whole file.")
        if len(data) > self._limits.max_item_bytes:
            raise DecodeError(
                f"There are {len(data)} bytes; the limit is {self._limits.max_item_bytes}.", "Give a smaller file."
            )
        if task.ref.modality == "image":
            decode.check_header(data, self._limits)
        sampling = self._sampling(task) if task.ref.modality == "video" else None
        with clock.stage("digest"):
            how = f"{task.ref.modality} {sampling}"
            return Source(kind, digest.of_bytes(data, how), data, sampling)

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
        return video.Sampling.of(chosen).at_most(task.options.get("max_frames"))

    def _image_source(self, given: Any, clock: _Clock) -> Source:
        if decode.is_array(given):
            return Source("array", digest.of_array("image", given), given)
        if not decode.is_picture(given):
            raise DecodeError(
                f"A {type(given).__name__} cannot be read as a picture.",
                "Give a PIL picture, an array, bytes or a path.",
            )
        if self._misfits(given):
            # Refused with its reason by the decoder, before its pixels are touched.
            return Source("PIL", b"", given)
        with clock.stage("decode"), decode.alone_with(given):
            try:
                given.load()
            except Exception as error:
                raise DecodeError(
                    "The picture is broken.", "Send it again, complete.", detail=first_line(error)
                ) from error
            plain = decode.is_plain_rgb(given)
            if not plain and not self._misfits(given):
                # Repacking pixels needs the interpreter; decoding, copying and hashing do not.
                with in_turn():
                    return Source("PIL", digest.of_picture(given), given)
        if self._misfits(given):
            # Some files tell their size only now.
            return Source("PIL", b"", given)
        return plain_rgb(given)

    def _misfits(self, picture: Any) -> bool:
        width, height = picture.size
        return bool(width * height > self._limits.max_pixels or min(width, height) < 1)

    def _video_source(self, given: Any) -> Source:
        frames, metadata = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if decode.is_tensor(frames):
            frames = frames.cpu().numpy()
        clip = video.from_frames(frames, metadata, self._limits)
        extra = [clip.total, clip.fps, None if clip.indices is None else list(clip.indices)]
        return Source("frames", digest.of_array("video", clip.frames, extra), clip)

    def _audio_source(self, given: Any) -> Source:
        if not (isinstance(given, tuple) and len(given) == 2):
            raise DecodeError("A sound as an array needs its sampling rate.", "Give (samples, rate).")
        wave = audio.from_array(given[0], given[1], self._limits)
        return Source("array", digest.of_array("audio", wave.samples, wave.rate), wave)

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
        around = self._family.embedded.get(ref.modality)
        if isinstance(around, tuple):
            before, behind = (text.format(setting=task.setting) for text in around)
            item = self._processor.between(item, before, behind)
        item = replace(item, digest=digest.salted(item.digest, task.salt))
        given = {"source": "embeddings", "shape": list(found[0].tensor.shape)}
        processed = Processed(item, {"embeddings": item.num_embeds}, ())
        return self._finish(task, "embeddings", Content(item.digest, given, ()), processed, clock, cached=False)

    def _finish(
        self, task: Task, kind: str, content: Content, processed: Processed, clock: _Clock, *, cached: bool
    ) -> Prepared:
        lost = (*content.lost, *processed.lost)
        if lost and self._strict:
            raise MediaLossError(
                f"strict_media is set, and {'; '.join(lost)}.",
                "Crop, pad or scale it to what the model reads.",
                or_engine="start without strict_media, whose receipts say what it reads",
            )
        given = {**content.given, "source": kind}
        if kind == "PIL":
            # What is remembered may be that of another file with the same pixels.
            given.pop("format", None)
            if form := getattr(task.ref.source, "format", None):
                given["format"] = form
        if task.ref.uuid is not None:
            given["uuid"] = task.ref.uuid
        treated = {"exif_rotated": given.pop("exif_rotated")} if "exif_rotated" in given else {}
        receipt = MediaReceipt(
            modality=task.ref.modality,
            index=task.index,
            given=given,
            used={**processed.used, **treated},
            lost=lost,
            tokens=len(processed.item.replacement_ids),
            cached=cached,
            milliseconds=clock.milliseconds,
            digest=processed.item.digest.hex(),
        )
        return Prepared(processed.item, receipt)


def _salted(task: Task, source: Source) -> Source:
    """Known only to those who give the same salt."""
    return replace(source, digest=digest.salted(source.digest, task.salt)) if task.salt and source.digest else source


def _opened_bytes(modality: str, payload: Any) -> int:
    """About what a source takes once it is opened. Of videos and sounds only decoding tells; most take less."""
    if not isinstance(payload, bytes):
        return int(getattr(payload, "nbytes", 0))
    if modality != "image":
        return _UNKNOWN_BYTES
    width, height = header.size_of(payload) or (0, 0)
    return 4 * width * height or _UNKNOWN_BYTES


def _is_encoded(source: Any) -> bool:
    return isinstance(source, str | Path | bytes | bytearray | Fetched)


def merge_size(info: ModelInfo) -> int:
    """Patches per embedding along each side, for families with a grid; 1 for others."""
    from beheld.checkpoint.files import CONFIG, read_json

    vision = read_json(Path(info.path) / CONFIG).get("vision_config") or {}
    value = vision.get("spatial_merge_size") if isinstance(vision, Mapping) else None
    return value if isinstance(value, int) and value > 0 else (2 if info.position_axes > 1 else 1)
