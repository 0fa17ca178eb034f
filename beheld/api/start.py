"""Starts an engine and its input pipeline, so that their processes load libraries at the same time."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from beheld.api.front_place import ALONE, FrontPlace
from beheld.core.config import EngineArgs, EngineConfig, MediaLimits, ModelInfo
from beheld.core.errors import ConfigError
from beheld.core.logits_processors import check_in_process
from beheld.core.media import MediaItem
from beheld.engine.data_parallel import DataParallelEngines
from beheld.engine.messages import Engine, Tokenizer
from beheld.engine.process import EngineProcess, OnDecided, Spawned, fork_or_spawn
from beheld.engine.process_group import ProcessGroup
from beheld.engine.ranks import LAUNCHED
from beheld.engine.routing import Router
from beheld.engine.setup import Setup, preload, resolve_and_decide, start, without_unused
from beheld.engine.shared_engine import SharedEngine
from beheld.inputs.media.tasks import PROCESSOR_LIBRARIES
from beheld.inputs.media.workers import EarlyWorkers, MediaWorkers
from beheld.inputs.pipeline import InputPipeline
from beheld.inputs.sampling import option_checks
from beheld.platform import host
from beheld.platform.probe import begin_driver, has_accelerator
from beheld.platform.registry import platform_of
from beheld.structured.rows import GrammarRows
from beheld.utils.gc_tuning import paused_collector
from beheld.utils.log import get_logger
from beheld.utils.roomy_stack import roomy

logger = get_logger(__name__)

# What the class of any model imports, and what tokenizers need.
_MODEL_LIBRARIES = ("transformers.modeling_layers", "transformers.models.auto.tokenization_auto")


@dataclass(frozen=True)
class Remote:
    """An engine elsewhere, not yet started; the model's facts, the decisions, and the pipeline of its requests.

    Attributes:
        place: which of its fronts this process is.
    """

    engine: Engine
    info: ModelInfo
    config: EngineConfig
    inputs: InputPipeline
    place: FrontPlace = ALONE


@roomy
def fork_engine() -> Spawned:
    """Start the process of an engine on the host's cores once the libraries of both processes are imported.

    Two processes that compete for a few cores would each import them.
    """
    with paused_collector():
        preload()
        for library in (*_MODEL_LIBRARIES, *PROCESSOR_LIBRARIES):
            # What misses a package says so when the model is loaded.
            with suppress(ImportError):
                importlib.import_module(library)
    spawned = fork_or_spawn()
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        # Work in this process takes milliseconds; several threads would only wait for the engine's cores.
        torch.set_num_threads(1)
    return spawned


@roomy
@paused_collector()
def start_both(args: EngineArgs) -> tuple[Setup, InputPipeline]:
    """The engine, and the pipeline that prepares its requests.

    Raises:
        ConfigError, ModelError, CapacityError: the message says what to do; no process is left.
    """
    early = EarlyWorkers(args, accelerated=has_accelerator(args.device))
    try:
        begin_driver(args.device)
        decided = resolve_and_decide(args)
        # Before loading the weights, so that a misspelt option does not cost minutes.
        processor = option_checks.load_for_options(args, decided.info)
        workers = _settled(early, args, decided.info, decided.config)
        setup = start(args, decided)
        inputs = InputPipeline(setup.info, setup.config, args, workers, processor)
        setup.core.executor.try_items(first_items(inputs, setup.info, setup.config))
    except BaseException:
        early.close()
        raise
    setup.core.grammars = GrammarRows(inputs.compiler)
    return setup, inputs


def start_processes(
    args: EngineArgs,
    spawned: Sequence[Spawned] | None = None,
    place: FrontPlace = ALONE,
    on_decided: OnDecided | None = None,
) -> Remote:
    """The engine in a process, or several of them as `data_parallel_size` says.

    Args:
        spawned: the processes, if they already run.
        place: with several fronts, that of the first; the engine is a SharedEngine then.
        on_decided: as of EngineProcess.

    Raises:
        ConfigError, ModelError, CapacityError, EngineDeadError: the message says what to do; no process is left.
    """
    if args.data_parallel_size > 1 and args.distributed_executor_backend == LAUNCHED:
        raise ConfigError(
            f"distributed_executor_backend={LAUNCHED!r} with data_parallel_size is built for LLM alone, "
            "which each of torchrun's processes has.",
            "Start without torchrun, and leave distributed_executor_backend out: the engines are started here.",
            param="data_parallel_size",
        )
    args = without_unused(args)
    check_in_process(args.logits_processors)
    # Before loading the weights, so that a misspelt option does not cost minutes.
    option_checks.check(args)
    remote: EngineProcess | ProcessGroup | None = None
    workers: MediaWorkers | None = None
    early = EarlyWorkers(args, accelerated=has_accelerator(args.device))

    def warm(info: ModelInfo, config: EngineConfig) -> None:
        nonlocal workers
        if on_decided is not None:
            on_decided(info, config)
        workers = _settled(early, args, info, place.config(config), place)
        workers.import_here()

    try:
        processor = option_checks.load_for_options(args)
        if args.data_parallel_size > 1:
            remote = ProcessGroup(args, spawned, warm)
        else:
            remote = EngineProcess(args, spawned[0] if spawned else None, warm)
        inputs = InputPipeline(remote.info, place.config(remote.config), args, workers, processor)
        remote.try_items(first_items(inputs, remote.info, remote.config))
        compiler = inputs.compiler
        remote.use(
            lambda: Tokenizer(compiler.tokenizer_json(), compiler.vocab_size, compiler.eos_ids),
            now=warms_grammars(remote.info, remote.config),
        )
    except BaseException:
        early.close()
        if remote is not None:
            remote.close()
        raise
    engine: Engine
    if isinstance(remote, EngineProcess):
        engine = remote
    else:
        config = remote.config
        router = Router(len(remote.engines), config.max_encoder_tokens, config.max_num_batched_tokens)
        engine = DataParallelEngines(remote.engines, remote, router)
    if place.count > 1:
        engine = SharedEngine(engine)
    return Remote(engine, remote.info, remote.config, inputs, place)


@paused_collector()
def start_front(
    args: EngineArgs, engine: Engine, place: FrontPlace, decided: Callable[[], tuple[ModelInfo, EngineConfig]]
) -> Remote:
    """A further front of an engine that another process has.

    Args:
        engine: the connection to it.
        decided: waits for the model's facts and the engine's decisions: before the weights are loaded, and then for
            the final ones.

    Raises:
        ConfigError, ModelError: as `start_processes`; no process is left.
    """
    early = EarlyWorkers(args, accelerated=has_accelerator(args.device))
    try:
        processor = option_checks.load_for_options(args)
        importlib.import_module("transformers.models.auto.tokenization_auto")
        info, config = decided()
        workers = _settled(early, args, info, place.config(config), place)
        info, config = decided()
        inputs = InputPipeline(info, place.config(config), args, workers, processor)
        # Loads what items are made with, so that no request waits for that.
        first_items(inputs, info, config)
    except BaseException:
        early.close()
        raise
    return Remote(engine, info, config, inputs, place)


def _settled(
    early: EarlyWorkers, args: EngineArgs, info: ModelInfo, config: EngineConfig, place: FrontPlace = ALONE
) -> MediaWorkers:
    """Fit the limits on media to what engines in the host's memory leave, and return the workers, which load their
    processor."""
    taken = 0
    if platform_of(config.device).shares_host_memory:
        weights = sum(file.stat().st_size for file in Path(info.path).glob("*.safetensors"))
        taken = args.data_parallel_size * (weights + (config.kv_cache_bytes or 0))
    fit_media(args, taken_bytes=taken, num_fronts=place.count)
    return early.settled(info, config)


def fit_media(args: EngineArgs, taken_bytes: int = 0, num_fronts: int = 1) -> None:
    """Lower the limits on media to the memory that the process's control group leaves, without `taken_bytes`.

    Each of several fronts has its part of that.

    The limit of a control group ends processes that take too much. Without one, the limits stay as they are.
    """
    group = host.group_memory()
    if group is None:
        return
    left = max(0, group[0] - taken_bytes) // num_fronts
    fitting = MediaLimits.within(args.media_limits, left)
    if fitting != dict(args.media_limits or {}):
        logger.info("The container leaves %d MiB: media_limits are %s.", left >> 20, fitting)
        args.media_limits = fitting


def first_items(inputs: InputPipeline, info: ModelInfo, config: EngineConfig) -> list[MediaItem]:
    """Items with which the engine tests itself and compiles its towers, so that no request waits for that.

    The process that compiles grammars starts meanwhile, where `warms_grammars`.

    Raises:
        ModelError: the checkpoint's processor cannot make one.
    """
    if warms_grammars(info, config):
        inputs.warm_grammars()
    platform = platform_of(config.device)
    return inputs.sample_items(large=platform.compiles_layers and not config.enforce_eager)


def warms_grammars(info: ModelInfo, config: EngineConfig) -> bool:
    """Whether grammars get ready at the start: the model answers in text, and the device leaves the host time."""
    return info.pooler is None and not platform_of(config.device).shares_host_memory
