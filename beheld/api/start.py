"""Starts an engine and its input pipeline, so that their processes load libraries at the same time."""

from __future__ import annotations

from beheld.core.config import EngineArgs, EngineConfig, ModelInfo
from beheld.core.media import MediaItem
from beheld.engine.setup import Setup, resolve_and_decide, start
from beheld.inputs.media.workers import MediaWorkers
from beheld.inputs.pipeline import InputPipeline
from beheld.inputs.sampling import option_checks
from beheld.platform.registry import platform_of
from beheld.structured.rows import GrammarRows


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
        setup.core.executor.try_items(first_items(inputs, setup.info, setup.config))
    except BaseException:
        workers.sandbox.close()
        raise
    setup.core.grammars = GrammarRows(inputs.compiler)
    return setup, inputs


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
