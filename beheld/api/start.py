"""Starts an engine and its input pipeline, so that their processes load libraries at the same time."""

from __future__ import annotations

from beheld.core.config import EngineArgs
from beheld.engine.setup import Setup, resolve_and_decide, start
from beheld.inputs.media.workers import MediaWorkers
from beheld.inputs.pipeline import InputPipeline
from beheld.inputs.sampling import option_checks
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
        if args.load_format != "dummy":
            setup.core.executor.try_items(inputs.sample_items())
    except BaseException:
        workers.sandbox.close()
        raise
    setup.core.grammars = GrammarRows(inputs.compiler)
    return setup, inputs
