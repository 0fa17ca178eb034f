"""Starts an engine and its input pipeline, so that their processes load libraries at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.engine.data_parallel import DataParallelEngines
from beheld.engine.messages import Engine, Tokenizer
from beheld.engine.process import EngineProcess, Spawned
from beheld.engine.process_group import ProcessGroup
from beheld.engine.routing import Router
from beheld.engine.setup import Setup, resolve_and_decide, start
from beheld.inputs.media.workers import MediaWorkers
from beheld.inputs.pipeline import InputPipeline
from beheld.inputs.sampling import option_checks
from beheld.structured.rows import GrammarRows


@dataclass(frozen=True)
class Remote:
    """An engine elsewhere, not yet started; the model's facts, the decisions, and the pipeline of its requests."""

    engine: Engine
    info: ModelInfo
    config: EngineConfig
    inputs: InputPipeline


def start_both(args: EngineArgs) -> tuple[Setup, InputPipeline]:
    """The engine, and the pipeline that prepares its requests.

    Raises:
        ConfigError, ModelError, CapacityError: the message says what to do; no process is left.
    """
    decided = resolve_and_decide(args)
    # Before loading the weights, so that a misspelt option does not cost minutes.
    processor = option_checks.load_for_options(args, decided.info)
    workers = MediaWorkers(decided.info, decided.config, args)
    try:
        # Now, so that media workers load a processor while the weights are loaded.
        workers.warm()
        setup = start(args, decided)
        inputs = InputPipeline(setup.info, setup.config, args, workers, processor)
        if args.load_format != "dummy":
            setup.core.executor.try_items(inputs.sample_items())
    except BaseException:
        workers.sandbox.close()
        raise
    setup.core.grammars = GrammarRows(inputs.compiler)
    return setup, inputs


def start_processes(args: EngineArgs, spawned: Sequence[Spawned] | None = None) -> Remote:
    """The engine in a process, or several of them as `data_parallel_size` says.

    Args:
        spawned: the processes, if they already run.

    Raises:
        ConfigError, ModelError, CapacityError, EngineDeadError: the message says what to do; no process is left.
    """
    processor = option_checks.load_for_options(args)
    remote: EngineProcess | ProcessGroup
    if args.data_parallel_size > 1:
        remote = ProcessGroup(args, spawned)
    else:
        remote = EngineProcess(args, spawned[0] if spawned else None)
    try:
        inputs = InputPipeline(remote.info, remote.config, args, processor=processor)
        if args.load_format != "dummy":
            remote.try_items(inputs.sample_items())
    except BaseException:
        remote.close()
        raise
    compiler = inputs.compiler
    remote.use(lambda: Tokenizer(compiler.tokenizer_json(), compiler.vocab_size, compiler.eos_ids))
    engine: Engine
    if isinstance(remote, EngineProcess):
        engine = remote
    else:
        config = remote.config
        router = Router(len(remote.engines), config.max_encoder_tokens, config.max_num_batched_tokens)
        engine = DataParallelEngines(remote.engines, remote, router)
    return Remote(engine, remote.info, remote.config, inputs)
