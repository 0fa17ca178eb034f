"""Runs one verification: both sides, one after the other, and the comparison."""

from __future__ import annotations

import dataclasses

from beheld.checkpoint.files import CONFIG, read_json
from beheld.checkpoint.quantized import stated
from beheld.checkpoint.resolve import resolve
from beheld.core.config import QUANTIZED_AT_LOAD, EngineArgs
from beheld.tools.verify.compare import StageVerdict, compare, first_difference
from beheld.tools.verify.loss import Loss, loss
from beheld.tools.verify.reference import Reference
from beheld.tools.verify.trace import Question
from beheld.tools.verify.watched_engine import WatchedEngine


class Sides:
    """Both sides of one checkpoint, loaded at once, for several questions; `close` ends them.

    Raises:
        BeheldError: a side cannot load it.
    """

    def __init__(self, args: EngineArgs) -> None:
        args = _on_cpu(args)
        self._reference = Reference(args)
        self._engine = WatchedEngine(args)

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both sides."""
        self._engine.close()

    def ask(self, question: Question) -> tuple[list[StageVerdict], StageVerdict | None]:
        """Return all stages, and the first that differs.

        Raises:
            BeheldError: a side cannot answer.
        """
        stages = compare(self._reference.trace(question), self._engine.trace(question))
        return stages, first_difference(stages)


def verify(args: EngineArgs, question: Question) -> tuple[list[StageVerdict], StageVerdict | None]:
    """Return all stages, and the first that differs; both sides compute on the CPU, one after the other.

    Raises:
        BeheldError: a side cannot answer.
    """
    args = _on_cpu(args)
    # One model is freed before the other is loaded.
    theirs = Reference(args).trace(question)
    engine = WatchedEngine(args)
    try:
        stages = compare(theirs, engine.trace(question))
    finally:
        engine.close()
    return stages, first_difference(stages)


def is_rounded_at_load(args: EngineArgs) -> bool:
    """Return whether `args.quantization` rounds the checkpoint's weights, and does not only name its own method."""
    if args.quantization not in QUANTIZED_AT_LOAD:
        return False
    own = stated(read_json(resolve(args) / CONFIG)) or {}
    return own.get("quant_method") != args.quantization


def rounds_cache(args: EngineArgs) -> bool:
    """Return whether `args.kv_cache_dtype` rounds keys and values: the stages of such an engine differ anyway."""
    return args.kv_cache_dtype not in ("auto", _on_cpu(args).dtype)


def quantization_loss(args: EngineArgs, question: Question, unquantized: str | None) -> Loss:
    """Return what the answer loses by `args.quantization` and `args.kv_cache_dtype`, computed on the CPU.

    Args:
        unquantized: the model of which `args.model` is a quantized form, if that is what is measured.

    Raises:
        BeheldError: a model cannot be loaded or cannot answer.
    """
    args = _on_cpu(args)
    if unquantized is not None:
        return loss(args, question, dataclasses.replace(args, model=unquantized))
    # A checkpoint's own quantization stays on both sides: the keys and values alone are compared then.
    return loss(args, question, None if is_rounded_at_load(args) else args)


def _on_cpu(args: EngineArgs) -> EngineArgs:
    return dataclasses.replace(args, dtype="float32" if args.dtype == "auto" else args.dtype, device="cpu")
