"""Decodes and processes media, in the caller's process or in the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, MediaWork, ModelInfo
from beheld.inputs.media import document
from beheld.inputs.media.open_media import Source, open_source
from beheld.inputs.media.tasks import (
    PROCESSOR_LIBRARIES,
    Decoded,
    DecodeTask,
    InspectTask,
    ProcessedMedia,
    ProcessTask,
    decode_type,
    inspect_type,
    load_processor,
    process_type,
)
from beheld.sandbox.sandbox import Sandbox
from beheld.utils.cancellation import CancelToken

# Larger images are also processed in workers where these otherwise only decode: the interpreter is held while a copy of
# an image is freed, which takes some 40 ms of a core for 512 MiB.
_MOST_HERE_BYTES = 256 << 20


class EarlyWorkers:
    """Media workers before the model is known: the libraries that they need load while its configuration is read.

    Args:
        args: the user's options.
        accelerated: whether the machine seems to have an accelerator, in which case workers process media.
    """

    def __init__(self, args: EngineArgs, *, accelerated: bool) -> None:
        self._args = args
        self._sandbox = Sandbox()
        process = args.media_work == MediaWork.PROCESS or (args.media_work == "auto" and accelerated)
        if process and args.media_workers != 0:
            self._sandbox.begin(load_processor, PROCESSOR_LIBRARIES)

    def settled(self, info: ModelInfo, config: EngineConfig) -> MediaWorkers:
        """Return the workers, which load the model's processor from now on."""
        workers = MediaWorkers(info, config, self._args, self._sandbox)
        workers.warm()
        return workers

    def close(self) -> None:
        """End the workers and what has begun."""
        self._sandbox.close()


class MediaWorkers:
    """Decodes and processes media as the engine is configured. Safe to use from several threads.

    Without workers, all work happens in the caller's process, where a runaway call cannot be stopped.

    Args:
        sandbox: the engine's, where it has begun.

    Attributes:
        sandbox: the engine's, which also serves other untrusted input.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig, args: EngineArgs, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox or Sandbox()
        self._limits = MediaLimits.of(args.media_limits)
        in_sandbox = config.media_workers > 0
        self.process_too = in_sandbox and config.media_work is MediaWork.PROCESS and bool(info.modalities)
        self._decode_type = decode_type(self._limits, config.media_workers) if in_sandbox else None
        self._inspect_type = inspect_type(self._limits, config.media_workers) if in_sandbox else None
        can_process = in_sandbox and bool(info.modalities) and (self.process_too or args.media_work == "auto")
        self._process_type = process_type(info, config, args) if can_process else None
        self._processes_here = bool(info.modalities) and not self.process_too
        if not self.process_too:
            self.sandbox.abandon(load_processor)

    def warm(self) -> None:
        """Let processing workers load their processor now, while the model loads: it takes seconds."""
        if self._process_type is not None and self.process_too:
            self.sandbox.warm(self._process_type)

    def import_here(self) -> None:
        """Import what processors need, if media are processed in this process: the test items at the end of the start
        need it, and this process has nothing to do while the engine's loads the model."""
        if self._processes_here:
            for library in PROCESSOR_LIBRARIES:
                # What misses a package says so when the processor is loaded.
                with suppress(ImportError):
                    import_module(library)

    def processes(self, source: Source, opened_bytes: int) -> bool:
        """Whether a source, which takes so many bytes when it is open, is also processed in the sandbox."""
        if self.process_too:
            return True
        return self._process_type is not None and isinstance(source.payload, bytes) and opened_bytes > _MOST_HERE_BYTES

    def decode(
        self,
        modality: str,
        source: Source,
        rate: Callable[[], int],
        cancel: CancelToken | None = None,
        client: str = "",
    ) -> Decoded:
        """Decode a source; bytes are decoded in the sandbox.

        Args:
            modality: "image", "video" or "audio".
            source: the media source.
            rate: the sampling rate in Hz that the audio processor wants.
            cancel: kills the worker.
            client: who asks; clients take turns at the workers.

        Raises:
            DecodeError, LimitError: the content is wrong, or decoding takes too long or too much memory.
            WorkerError: the worker ended.
            Cancelled: the result is no longer needed.
        """
        if self._decode_type is None or not isinstance(source.payload, bytes):
            return Decoded(*open_source(modality, source, self._limits, rate))
        task = DecodeTask(modality, source, rate() if modality == "audio" else 0)
        return self.sandbox.run(self._decode_type, task, cancel, client)

    def inspect(
        self, data: bytes, wish: document.PageWish, cancel: CancelToken | None = None, client: str = ""
    ) -> document.DocumentFacts:
        """Inspect a document's bytes, in the sandbox.

        Args:
            data: the bytes.
            wish: what of it is wanted.
            cancel, client: as for `decode`.

        Raises:
            DecodeError, LimitError, ParamsError: see document.inspect; or it takes too long or too much memory.
            WorkerError, Cancelled: as `decode`.
        """
        if self._inspect_type is None:
            return document.inspect(data, wish, self._limits)
        return self.sandbox.run(self._inspect_type, InspectTask(data, wish), cancel, client)

    def process(
        self, task: ProcessTask, rate: Callable[[], int], cancel: CancelToken | None = None, client: str = ""
    ) -> ProcessedMedia:
        """Decode and process a source in the sandbox; sources other than bytes are decoded here.

        Raises:
            MediaError, ParamsError: the content or an option is wrong.
            WorkerError, Cancelled: see `decode`.
        """
        assert self._process_type is not None
        source = task.source
        if not isinstance(source.payload, bytes):
            opened, content = open_source(task.modality, source, self._limits, rate)
            task = replace(task, source=Source(source.kind, source.digest, opened, content=content))
        return self.sandbox.run(self._process_type, task, cancel, client)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the processes that decode or process media."""
        kinds = (self._decode_type, self._inspect_type, self._process_type)
        return tuple(number for kind in kinds if kind is not None for number in self.sandbox.pids(kind))
