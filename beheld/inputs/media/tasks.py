"""What workers are asked to do with one item, and how they do it: open it, or make all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.core.config import EngineArgs, KVGroup, MediaLimits, ModelInfo
from beheld.core.media import MediaItem
from beheld.inputs.media import audio, digest, video
from beheld.inputs.media.cache import Content, Processed
from beheld.inputs.media.open_media import Source, open_source, unpacked
from beheld.inputs.media.pixels import Pixels
from beheld.sandbox.codec import Codec


@dataclass(frozen=True, eq=False)
class Settings:
    """What workers need to know from the start.

    Attributes:
        limits: bounds on content.
        info, args: of the model; None if workers only decode.
        feature_dtype: type of floating-point features, as "bfloat16".
    """

    limits: MediaLimits
    info: ModelInfo | None = None
    args: EngineArgs | None = None
    feature_dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Open:
    """Open a source; `rate` is in Hz, for sounds. The answer is Opened."""

    modality: str
    source: Source
    rate: int = 0


@dataclass(frozen=True, eq=False)
class Opened:
    """Decoded content as `opening.open_source` gives it, and what is to be remembered of it."""

    opened: Any
    content: Content


@dataclass(frozen=True, eq=False)
class Make:
    """Make an item of a source. The answer is Made.

    Attributes:
        modality: "image", "video" or "audio".
        source: what came in.
        options, setting, salt: see media.Task.
    """

    modality: str
    source: Source
    options: Mapping[str, Any]
    setting: str
    salt: bytes


@dataclass(frozen=True, eq=False)
class Made:
    """A processed item, what is to be remembered of its content, and milliseconds per stage."""

    content: Content
    processed: Processed
    milliseconds: dict[str, float] = field(default_factory=dict)


CODEC = Codec(
    (
        *(Settings, Open, Opened, Make, Made, Source, Content, Processed, MediaItem),
        *(video.Sampling, video.Clip, audio.Waveform, Pixels),
        *(MediaLimits, ModelInfo, KVGroup, EngineArgs),
    )
)


def load(settings: Settings) -> Callable[[Any], Any]:
    """The function that does the work; whatever it needs is loaded now.

    Raises:
        ModelError: the processor cannot be loaded.
    """
    import numpy  # noqa: F401
    from PIL import Image

    # The readers of the usual formats; those of the others are not wanted.
    Image.preinit()
    # This process is ours alone, and here our own limits decide.
    Image.MAX_IMAGE_PIXELS = None
    processor = _processor(settings) if settings.info is not None else None

    def work(task: Open | Make) -> Opened | Made:
        if isinstance(task, Make):
            return _make(task, processor, settings.limits)
        opened, content = open_source(task.modality, task.source, settings.limits, lambda: task.rate)
        return Opened(opened, content)

    return work


def _processor(settings: Settings) -> Any:
    from beheld.families import registry
    from beheld.inputs.media.processor import ItemProcessor
    from beheld.inputs.prompt.tokenizer import PromptTokenizer, load_tokenizer

    info, args = settings.info, settings.args
    assert info is not None
    assert args is not None
    family = registry.inputs(info.family)
    inner = None if args.skip_tokenizer_init else load_tokenizer(info, args)
    tokenizer = PromptTokenizer(inner, info.placeholder_ids, family.places)
    processor = ItemProcessor(info, args, family, tokenizer, settings.feature_dtype)
    processor.loaded()
    processor.identity()
    return processor


def _make(task: Make, processor: Any, limits: MediaLimits) -> Made:
    from beheld.inputs.media.processor import Job

    begun = time.perf_counter()
    opened, content = open_source(task.modality, task.source, limits, processor.rate)
    decoded = time.perf_counter()
    own = processor.options(task.modality, task.options)
    key = digest.of_item(content.digest, task.modality, processor.identity(), task.options, task.setting)
    key = digest.salted(key, task.salt)
    # Pixels of bytes are let go of as soon as they are a picture; a task that came with them holds its own.
    opened = unpacked(opened)
    processed = processor.process(Job(task.modality, opened, key, own, task.setting))
    done = time.perf_counter()
    return Made(content, processed, {"decode": 1e3 * (decoded - begun), "process": 1e3 * (done - decoded)})
