"""Makes items from a user's media: read, look up, decode, process, describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from beheld.checkpoint.files import CONFIG, read_json
from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
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
from beheld.core.media import MediaItem, MediaReceipt, MediaRef, count_by_modality
from beheld.families.inputs import ByCount, BySizes, FamilyInputs
from beheld.inputs.fetch.fetch import Fetched, FetchRules
from beheld.inputs.media import decode, digest, embeds, header, soundtracks
from beheld.inputs.media.cache import Content, MediaCache, Processed
from beheld.inputs.media.memory_gate import MemoryGate
from beheld.inputs.media.open_media import Source, taken, unpacked
from beheld.inputs.media.processor import ItemProcessor, ProcessorInput
from beheld.inputs.media.processor_options import merged
from beheld.inputs.media.read_source import ItemOrder, SourceReader, StageClock
from beheld.inputs.media.tasks import ProcessTask
from beheld.inputs.media.workers import MediaWorkers
from beheld.utils import allocator
from beheld.utils.cancellation import CancelToken

_UNKNOWN_BYTES = 128 << 20
# After media that took more, all freed memory returns to the system: it takes a hundredth of the time that they took.
_MOST_KEPT_BYTES = 128 << 20


@dataclass(frozen=True, eq=False)
class PreparedItem:
    """A prepared item and its receipt; `further` are those of items that are read together with it."""

    item: MediaItem
    receipt: MediaReceipt
    further: tuple[MediaReceipt, ...] = ()


class ItemMaker:
    """Prepares items. Safe to use from several threads.

    Args:
        info: the model.
        config: the engine's.
        args: the user's options for processing, decoding and losses.
        processor: the model's processor.
        family: the model's family.
        rules: what may be opened.
        workers: decode and process items.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        args: EngineArgs,
        processor: ItemProcessor,
        family: FamilyInputs,
        rules: FetchRules,
        workers: MediaWorkers,
    ) -> None:
        self.cache = MediaCache(config.processor_cache_bytes)
        self._info = info
        self._processor = processor
        self._family = family
        self._reader = SourceReader(rules, processor, args.media_io_kwargs or {})
        self._workers = workers
        # Where workers process all media, they limit their own number instead.
        self._gate = MemoryGate(rules.limits.max_decoded_bytes)
        self._options_of_all = args.mm_processor_kwargs
        self._strict = args.strict_media
        # These threads only wait, each for one worker.
        self._threads: ThreadPoolExecutor | None = None
        if (count := config.media_workers) > 1:
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="beheld-media")

    def make_all(
        self, media: Sequence[MediaRef], options: Mapping[str, Any], salt: bytes, cancel: CancelToken, client: str = ""
    ) -> list[PreparedItem]:
        """Prepare the items of one request, in order; after all have ended, raise the first failure in that order.

        Args:
            media: the items.
            options: processor options of this request.
            salt: see ItemOrder.
            cancel: of the request.
            client: of the request.

        Raises:
            MediaError, ParamsError, WorkerError, Cancelled: as `make`.
        """
        totals = count_by_modality(media)
        seen: dict[str, int] = {}
        orders = []
        for ref in media:
            index = seen.get(ref.modality, 0)
            seen[ref.modality] = index + 1
            setting = self._family.setting(ref.modality, index + 1, totals)
            own = merged(self._options_of_all, options, ref.options)
            orders.append(ItemOrder(ref, index, own, setting, salt, cancel, client))
        if self._threads is None or len(orders) < 2:
            return [self.make(order) for order in orders]
        futures = [self._threads.submit(self.make, order) for order in orders]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def waveform(self, source: Any, cancel: CancelToken, client: str = "") -> Any:
        """Decode an audio, at the rate of the model's processor; nothing is cached.

        Raises:
            MediaError, WorkerError: it cannot be read.
            Cancelled: the request was cancelled.
        """
        order = ItemOrder(MediaRef("audio", source), 0, {}, "", b"", cancel, client)
        try:
            source = self._reader.read(order, StageClock())
            with self._gate.within(_opened_bytes("audio", source), cancel, client):
                return unpacked(self._workers.decode("audio", source, self._processor.rate, cancel, client).opened)
        except BeheldError as error:
            if isinstance(error, EngineError) and not isinstance(error, WorkerError):
                raise
            raise error.for_item("audio", "file") from error

    def close(self) -> None:
        """Stop the threads that wait for workers."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def make(self, order: ItemOrder) -> PreparedItem:
        """Prepare one item.

        Raises:
            MediaError, ParamsError, WorkerError: names the item.
            Cancelled: the request was cancelled.
        """
        order.cancel.check()
        try:
            return self._make(order)
        except ParamsError as error:
            if order.ref.options and order.ref.place is not None:
                # The message already names the options of this item.
                reason, remedy, detail = error.reason, error.remedy, error.detail
                raise ParamsError(
                    reason, remedy, param=order.ref.place.rpartition(".")[0], item=order.name, detail=detail
                ) from error
            raise error.for_item(order.name) from error
        except BeheldError as error:
            if isinstance(error, EngineError) and not isinstance(error, WorkerError):
                raise
            if order.ref.of_video is not None and isinstance(error, DecodeError):
                raise soundtracks.unread(error, order.ref.of_video).for_item(order.name, order.ref.place) from error
            raise error.for_item(order.name, order.ref.place) from error
        except MemoryError as error:
            reason = f"Preparing the {order.ref.modality} took more memory than there is."
            raise LimitError(reason, "Send a smaller one.", item=order.name, param=order.ref.place) from error
        except Exception as error:
            # Our bug or bad content; errors that content causes in libraries are handled where these are called.
            error.add_note(f"While {order.name} was prepared.")
            raise

    def _make(self, order: ItemOrder) -> PreparedItem:
        clock = StageClock()
        ref = order.ref
        if isinstance(ref.source, embeds.Embeddings) or embeds.given(ref.source):
            return self._from_embeddings(order, clock)
        if ref.source is None and ref.uuid is not None:
            return self._from_name(order, ref.uuid, clock)
        source = _salted(order, self._reader.read(order, clock))
        content, processed = self._found(order, source)
        if processed is None and source.borrowed:
            with clock.stage("digest"):
                source = _salted(order, taken(source))
            content, processed = self._found(order, source)
        cached = processed is not None
        if content is None or processed is None:
            opened_bytes = _opened_bytes(ref.modality, source)
            make = self._made_in_sandbox if self._workers.processes(source, opened_bytes) else self._made_here
            try:
                content, processed, cached = make(order, source, clock)
            finally:
                if opened_bytes > _MOST_KEPT_BYTES:
                    allocator.give_back_freed()
        if ref.uuid is not None and source.page is None:
            # The name of a document stands for none of its pages.
            self.cache.remember(self._name(order, ref.uuid), content)
        return self._finish(order, source.kind, content, processed, clock, cached=cached)

    def _from_name(self, order: ItemOrder, uuid: str, clock: StageClock) -> PreparedItem:
        """The item that came with this uuid before, without its content."""
        with clock.stage("digest"):
            content = self.cache.content(self._name(order, uuid))
        processed = None
        if content is not None:
            # A video came as a file, whose options chose its frames, or as frames.
            processed = self._known(order, content) or self.cache.get(self._digest(order, content, in_file=True))
        if content is None or processed is None:
            # The first words are those that vLLM's clients look for.
            raise DecodeError(
                f"Cache miss for {order.ref.modality} at index {order.index} but data is not provided: no item with "
                f"the uuid {uuid[:64]!r} is kept.",
                "Send the item itself with its uuid.",
            )
        return self._finish(order, "uuid", content, processed, clock, cached=True)

    def _name(self, order: ItemOrder, uuid: str) -> bytes:
        """Return the key of an item's uuid, and of how frames are chosen, known only to callers with the same salt."""
        how = f" {self._reader.sampling(order)}" if order.ref.modality == "video" else ""
        if order.ref.modality == "image" and (background := self._reader.background(order)) != decode.WHITE:
            how = f" {background}"
        return digest.salted(digest.of_name(uuid, order.ref.modality + how), order.salt)

    def _digest(self, order: ItemOrder, content: Content, *, in_file: bool = False) -> bytes:
        """Return the digest of everything that determines the features; see `_options`."""
        identity, options = self._processor.identity(), self._options(order, in_file=in_file)
        try:
            key = digest.of_item(content.digest, order.ref.modality, identity, options, order.setting)
        except TypeError as error:
            raise ParamsError(
                "The processor's options hold a value of an unsupported type.",
                "Use numbers, texts, and lists and mappings of these.",
                param="mm_processor_kwargs",
                detail=first_line(error),
            ) from error
        return digest.salted(key, order.salt)

    def _found(self, order: ItemOrder, source: Source) -> tuple[Content | None, Processed | None]:
        """Return the cached facts of a source, and its cached item."""
        content = self.cache.content(source.digest)
        return content, None if content is None else self._known(order, content)

    def _known(self, order: ItemOrder, content: Content) -> Processed | None:
        return self.cache.get(self._digest(order, content))

    def _made_here(self, order: ItemOrder, source: Source, clock: StageClock) -> tuple[Content, Processed, bool]:
        """Decode, look up and process in this process; the flag tells whether the cache had it."""
        modality = order.ref.modality
        with self._gate.within(_opened_bytes(modality, source), order.cancel, order.client):
            with clock.stage("decode"):
                decoded = self._workers.decode(modality, source, self._processor.rate, order.cancel, order.client)
            content = decoded.content
            self.cache.remember(source.digest, content)
            known = self._known(order, content)
            if known is not None:
                return content, known, True
            # Processing here cannot be interrupted.
            order.cancel.check()
            with clock.stage("load"):
                self._processor.loaded()
            with clock.stage("process"):
                own = self._processor.options(modality, self._options(order))
                # A decoded image's pixels are freed early; an already open source keeps its own.
                opened = unpacked(decoded.opened)
                del decoded
                processed = self._processor.process(
                    ProcessorInput(modality, opened, self._digest(order, content), own, order.setting)
                )
            self.cache.put(processed)
            return content, processed, False

    def _made_in_sandbox(self, order: ItemOrder, source: Source, clock: StageClock) -> tuple[Content, Processed, bool]:
        """Decode and process in one worker task; the flag tells whether the cache had it after all."""
        task = ProcessTask(order.ref.modality, source, self._options(order), order.setting, order.salt)
        room: AbstractContextManager[None] = nullcontext()
        if not self._workers.process_too:
            room = self._gate.within(_opened_bytes(order.ref.modality, source), order.cancel, order.client)
        with clock.stage("wait"), room:
            made = self._workers.process(task, self._processor.rate, order.cancel, order.client)
        clock.split("wait", made.milliseconds)
        self.cache.remember(source.digest, made.content)
        known = self._known(order, made.content)
        if known is not None:
            return made.content, known, True
        self.cache.put(made.processed)
        return made.content, made.processed, False

    def _options(self, order: ItemOrder, *, in_file: bool = False) -> Mapping[str, Any]:
        """Return the processor options that determine an item's features.

        Names are checked when an item is made, so a cached one needs no processor.

        Args:
            in_file: a video without a source was a file.
        """
        options = dict(order.options)
        if order.ref.modality == "image":
            # It has already been put behind the image.
            options.pop(decode.BACKGROUND, None)
        if self._family.interleave is not None:
            # They change no feature, only what is made of two items.
            options, _ = soundtracks.split(options)
        if order.ref.modality == "video" and (in_file or _is_encoded(order.ref.source)):
            # These options have already sampled the frames.
            options.pop("num_frames", None)
            options.pop("fps", None)
        return options

    # ------------------------------------------------------------------ finishing

    def _from_embeddings(self, order: ItemOrder, clock: StageClock) -> PreparedItem:
        ref = order.ref
        found = [ref.source]
        if not isinstance(ref.source, embeds.Embeddings):
            found = list(embeds.split(ref.source, ref.modality, self._info, merge_size(self._info)))
        if len(found) != 1:
            raise DecodeError(f"One part holds the embeddings of {len(found)} items.", "Send one item per part.")
        with clock.stage("digest"):
            item = embeds.to_item(found[0], ref.modality, self._info.placeholder_ids[ref.modality])
        around = self._family.embedded.get(ref.modality)
        sizes = found[0].sizes
        if isinstance(around, BySizes):
            item = self._processor.sized(item, around, sizes, order.setting)
        elif sizes is not None:
            raise DecodeError(
                f"Unknown tensor {embeds.SIZES[ref.modality]!r} among the embeddings.",
                "Leave it out: this model needs no sizes.",
            )
        if isinstance(around, ByCount):
            item = self._processor.counted(item, around)
        if isinstance(around, tuple):
            before, after = (text.format(setting=order.setting) for text in around)
            item = self._processor.between(item, before, after)
        item = replace(item, digest=digest.salted(item.digest, order.salt))
        given = {"source": "embeddings", "shape": list(found[0].tensor.shape)}
        processed = Processed(item, {"embeddings": item.num_embeds}, ())
        return self._finish(order, "embeddings", Content(item.digest, given, ()), processed, clock, cached=False)

    def _finish(
        self, order: ItemOrder, kind: str, content: Content, processed: Processed, clock: StageClock, *, cached: bool
    ) -> PreparedItem:
        lost = (*content.lost, *processed.lost)
        if lost and self._strict:
            raise MediaLossError(
                f"strict_media is set, and {'; '.join(lost)}.",
                "Crop, pad or scale it to what the model reads.",
                or_engine="start without strict_media; receipts then report what the model reads",
            )
        given = {**content.given, "source": kind}
        if kind == "PIL":
            # The cached facts may come from another file with the same pixels.
            given.pop("format", None)
            if form := getattr(order.ref.source, "format", None):
                given["format"] = form
        if order.ref.uuid is not None:
            given["uuid"] = order.ref.uuid
        treated: dict[str, Any] = {
            name: given.pop(name) for name in ("exif_rotated", "exif_orientation") if name in given
        }
        receipt = MediaReceipt(
            modality=order.ref.modality,
            index=order.index,
            given=given,
            used={**processed.used, **treated},
            lost=lost,
            tokens=len(processed.item.replacement_ids),
            cached=cached,
            milliseconds=clock.milliseconds,
            digest=processed.item.digest.hex(),
        )
        return PreparedItem(processed.item, receipt)


def _salted(order: ItemOrder, source: Source) -> Source:
    """Return the digest, known only to callers with the same salt."""
    return replace(source, digest=digest.salted(source.digest, order.salt)) if order.salt and source.digest else source


def _opened_bytes(modality: str, source: Source) -> int:
    """Estimate the bytes of an opened source; only decoding can tell for videos and audio, and most take less."""
    payload = source.payload
    if source.page is not None:
        return 4 * source.page.width * source.page.height
    if not isinstance(payload, bytes):
        return int(getattr(payload, "nbytes", 0))
    if modality != "image":
        return _UNKNOWN_BYTES
    width, height = header.size_of(payload) or (0, 0)
    return 4 * width * height or _UNKNOWN_BYTES


def _is_encoded(source: Any) -> bool:
    return isinstance(source, str | Path | bytes | bytearray | Fetched)


def merge_size(info: ModelInfo) -> int:
    """Return the patches per embedding along each side, for families with a grid; 1 for others."""
    vision = read_json(Path(info.path) / CONFIG).get("vision_config") or {}
    value = vision.get("spatial_merge_size") if isinstance(vision, Mapping) else None
    return value if isinstance(value, int) and value > 0 else (2 if info.position_axes > 1 else 1)
