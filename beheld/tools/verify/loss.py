"""What an answer loses where weights, or keys and values, are rounded, position by position.

The unrounded model answers greedily; the rounded one is given that answer's tokens, and the prompt's, so that both
see the same input at each position.

Shapes: V vocabulary.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass

from torch import Tensor

from beheld.core.config import EngineArgs
from beheld.tools.verify.trace import Question
from beheld.tools.verify.watched_engine import WatchedEngine


@dataclass(frozen=True)
class Loss:
    """How two models differ over one answer.

    Attributes:
        method: what is rounded: the value of the option `quantization`, or the quantized model's name, and the type of
            rounded keys and values.
        equal: for each position, whether both would choose the same token.
        kl: for each position, the Kullback-Leibler divergence of the quantized model's distribution from the
            unquantized model's, in nats.
        same_prompt: whether the quantized model's own tokenizer and chat template make the same tokens of the question.
            A question without media is given as the unquantized model's tokens all the same.
    """

    method: str
    equal: tuple[bool, ...]
    kl: tuple[float, ...]
    same_prompt: bool = True

    @property
    def share_equal(self) -> float:
        """Return the share of positions at which both would choose the same token."""
        return sum(self.equal) / len(self.equal)

    def __str__(self) -> str:
        words = (
            f"{self.method}: of {len(self.equal)} greedy tokens {self.share_equal:.1%} are those of the unrounded "
            f"model; KL per position: mean {statistics.fmean(self.kl):.3g}, largest {max(self.kl):.3g} nats."
        )
        return words if self.same_prompt else f"{words} Its own tokenizer makes other tokens of the question."


def loss(args: EngineArgs, question: Question, unquantized: EngineArgs | None = None) -> Loss:
    """Return what the weights of `args` lose, and its keys and values; one model is freed before the other is loaded.

    Args:
        unquantized: selects the unquantized model; by default it is that of `args` without `args.quantization`.
            Its keys and values are not rounded.

    Raises:
        BeheldError: a model cannot be loaded or cannot answer.
    """
    whole = WatchedEngine(
        dataclasses.replace(unquantized or dataclasses.replace(args, quantization=None), kv_cache_dtype="auto")
    )
    try:
        wanted = whole.trace(question)
    finally:
        whole.close()
    engine = WatchedEngine(args)
    try:
        found, same_prompt = engine.logits_after(question, wanted.prompt_ids, wanted.token_ids)
    finally:
        engine.close()
    pairs = list(zip(wanted.logits, found, strict=True))
    equal = tuple(bool(want_V.argmax() == got_V.argmax()) for want_V, got_V in pairs)
    kl = tuple(_divergence(want_V, got_V) for want_V, got_V in pairs)
    return Loss(_method(args, unquantized), equal, kl, same_prompt)


def _method(args: EngineArgs, unquantized: EngineArgs | None) -> str:
    """Return the name of what is rounded."""
    named = "" if unquantized is not None and unquantized.model == args.model else args.quantization or str(args.model)
    cache = "" if args.kv_cache_dtype == "auto" else f"keys and values in {args.kv_cache_dtype}"
    return ", ".join(filter(None, (named, cache)))


def _divergence(want_V: Tensor, got_V: Tensor) -> float:
    """Return the divergence of softmax(got) from softmax(want); ids that neither can give count nothing."""
    size = min(len(want_V), len(got_V))
    p_V, q_V = (each[:size].double().log_softmax(-1) for each in (want_V, got_V))
    terms_V = p_V.exp() * (p_V - q_V)
    return max(0.0, float(terms_V[p_V.exp() > 0].sum()))
