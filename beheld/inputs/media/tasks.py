"""The sandbox's media tasks: decode a source, or make a complete item."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beheld.core.config import MODEL_CLASSES, EngineArgs, EngineConfig, MediaLimits, ModelInfo
from beheld.core.errors import LimitError, WorkerError
from beheld.core.media import MediaItem
from beheld.families import registry
from beheld.inputs.media import audio, digest, document, header, video
from beheld.inputs.media.cache import Content, Processed
from beheld.inputs.media.open_media import Source, open_source, unpacked
from beheld.inputs.media.pixels import Pixels
from beheld.inputs.media.processor import ItemProcessor, ProcessorInput
from beheld.inputs.prompt.tokenizer import PromptTokenizer, for_workers, load_tokenizer
from beheld.sandbox.task_type import Fault, TaskType, WorkerFault
from beheld.wire.codec import Codec

# The part of the time limit that the smallest image gets, and the pixels from which an image gets all of it.
_SMALL_PART, _ALL_PIXELS = 0.4, 100_000_000


@dataclass(frozen=True, eq=False)
class DecodeTask:
    """Decode a source; `rate` is in Hz, for audio. The result is Decoded."""

    modality: str
    source: Source
    rate: int = 0


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded content as from `open_media.open_source`, and the facts to cache."""

    opened: Any
    content: Content


@dataclass(frozen=True, eq=False)
class InspectTask:
    """Inspect the bytes of a document. The result is document.DocumentFacts."""

    data: bytes
    wish: document.PageWish


@dataclass(frozen=True, eq=False)
class ProcessTask:
    """Make an item of a source. The result is ProcessedMedia.

    Attributes:
        modality: "image", "video" or "audio".
        source: the media source.
        options, setting, salt: see item_maker.ItemOrder.
    """

    modality: str
    source: Source
    options: Mapping[str, Any]
    setting: str
    salt: bytes


@dataclass(frozen=True, eq=False)
class ProcessedMedia:
    """A processed item, its content's facts to cache, and milliseconds per stage."""

    content: Content
    processed: Processed
    milliseconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ProcessSettings:
    """Limits on content, the model, and the type of floating-point features, such as "bfloat16"."""

    limits: MediaLimits
    info: ModelInfo
    args: EngineArgs
    feature_dtype: str


# What every processor of transformers imports, which takes seconds.
PROCESSOR_LIBRARIES = ("transformers.models.auto.processing_auto", "transformers.image_processing_utils_fast")

CODEC = Codec(
    (
        *(DecodeTask, Decoded, ProcessTask, ProcessedMedia, ProcessSettings, Source, Content, Processed, MediaItem),
        *(video.FrameSampling, video.Clip, audio.Waveform, Pixels),
        *(InspectTask, document.DocumentFacts, document.PageChoice, document.PageWish),
        *(document.DocumentKind, document.TextLayer),
        *(MediaLimits, *MODEL_CLASSES),
    )
)


def decode_type(limits: MediaLimits, max_workers: int) -> TaskType[DecodeTask, Decoded]:
    """Decoding in the sandbox."""
    return TaskType(
        load=load_decoder,
        settings=lambda: limits,
        answer=Decoded,
        timeout_s=lambda task: _timeout_s(task, limits),
        memory_bytes=limits.max_work_bytes,
        max_workers=max_workers,
        error=lambda task, fault: _error(task, limits, fault),
    )


def inspect_type(limits: MediaLimits, max_workers: int) -> TaskType[InspectTask, document.DocumentFacts]:
    """Inspecting documents in the sandbox."""
    seconds = limits.work_timeout_s["document"]

    def error(task: InspectTask, fault: WorkerFault) -> Exception:
        if fault.fault is Fault.TIME:
            return LimitError(f"Reading the document took more than {seconds:.3g} s.", "Send a smaller one.")
        if fault.fault is Fault.MEMORY:
            return LimitError("Reading the document took more memory than is allowed.", "Send a smaller one.")
        return WorkerError(f"The process that read the document ended ({fault.how}).", "Send it again.")

    return TaskType(
        load=load_inspector,
        settings=lambda: limits,
        answer=document.DocumentFacts,
        timeout_s=lambda task: seconds,
        memory_bytes=limits.max_work_bytes,
        max_workers=max_workers,
        error=error,
    )


def process_type(info: ModelInfo, config: EngineConfig, args: EngineArgs) -> TaskType[ProcessTask, ProcessedMedia]:
    """Decoding and processing in the sandbox, in one task."""
    limits = MediaLimits.of(args.media_limits)
    settings = ProcessSettings(limits, info, for_workers(info, args), config.dtype)
    return TaskType(
        load=load_processor,
        settings=lambda: settings,
        answer=ProcessedMedia,
        timeout_s=lambda task: _timeout_s(task, limits),
        memory_bytes=limits.max_work_bytes,
        max_workers=config.media_workers,
        error=lambda task, fault: _error(task, limits, fault),
        libraries=PROCESSOR_LIBRARIES,
    )


def _timeout_s(task: DecodeTask | ProcessTask, limits: MediaLimits) -> float:
    """Seconds for a task: by the size of an image, as its header tells it; by the limit for all else."""
    most = limits.work_timeout_s[task.modality]
    size = header.size_of(task.source.payload) if isinstance(task.source.payload, bytes) else None
    if task.modality != "image" or size is None:
        return most
    return most * min(1.0, _SMALL_PART + size[0] * size[1] / _ALL_PIXELS)


def _error(task: DecodeTask | ProcessTask, limits: MediaLimits, fault: WorkerFault) -> Exception:
    modality = task.modality
    if fault.fault is Fault.TIME:
        seconds = _timeout_s(task, limits)
        return LimitError(f"Preparing the {modality} took more than {seconds:.3g} s.", "Send a smaller one.")
    if fault.fault is Fault.MEMORY:
        return LimitError(f"Preparing the {modality} took more memory than is allowed.", "Send a smaller one.")
    return WorkerError(f"The process that prepared the {modality} ended ({fault.how}).", "Send it again.")


# ---------------------------------------------------------------------- in worker processes


def load_decoder(limits: MediaLimits) -> Callable[[DecodeTask], Decoded]:
    """Return the function that decodes."""
    _load_readers()

    def decode(task: DecodeTask) -> Decoded:
        opened, content = open_source(task.modality, task.source, limits, lambda: task.rate)
        return Decoded(opened, content)

    return decode


def load_inspector(limits: MediaLimits) -> Callable[[InspectTask], document.DocumentFacts]:
    """Return the function that inspects documents."""
    _load_readers()
    return lambda task: document.inspect(task.data, task.wish, limits)


def load_processor(settings: ProcessSettings) -> Callable[[ProcessTask], ProcessedMedia]:
    """Return the function that decodes and processes, with the processor loaded.

    Raises:
        ModelError: the processor cannot be loaded.
    """
    _load_readers()
    info, args = settings.info, settings.args
    family = registry.inputs_of(info.family, Path(info.path))
    inner = None if args.skip_tokenizer_init else load_tokenizer(info, args)
    tokenizer = PromptTokenizer.of(inner, info, family)
    processor = ItemProcessor(info, args, family, tokenizer, settings.feature_dtype)
    processor.loaded()
    processor.identity()
    return lambda task: _process(task, processor, settings.limits)


def _load_readers() -> None:
    import numpy  # noqa: F401
    from PIL import Image

    # Preload the readers of usual formats; disable the others.
    Image.preinit()
    # This process is ours alone, and our limits apply instead.
    Image.MAX_IMAGE_PIXELS = None
    # A file of 64 KB may be worth thousands of warnings, each a line of the log.
    warnings.filterwarnings("ignore", module="PIL")


def _process(task: ProcessTask, processor: ItemProcessor, limits: MediaLimits) -> ProcessedMedia:
    begun = time.perf_counter()
    opened, content = open_source(task.modality, task.source, limits, processor.rate)
    decoded = time.perf_counter()
    own = processor.options(task.modality, task.options)
    key = digest.of_item(content.digest, task.modality, processor.identity(), task.options, task.setting)
    key = digest.salted(key, task.salt)
    # A decoded image's pixels are freed early; a task that came with an image keeps it.
    opened = unpacked(opened)
    processed = processor.process(ProcessorInput(task.modality, opened, key, own, task.setting))
    done = time.perf_counter()
    return ProcessedMedia(content, processed, {"decode": 1e3 * (decoded - begun), "process": 1e3 * (done - decoded)})
