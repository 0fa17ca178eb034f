"""What an answer loses by quantization at load: the same weights unquantized, position by position.

The unquantized model answers greedily; the quantized one is given that answer's tokens, and the prompt's, so that both
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
        method: the value of the option `quantization`, or the quantized model's name.
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
            f"{self.method}: of {len(self.equal)} greedy tokens {self.share_equal:.1%} are those of the unquantized "
            f"weights; KL per position: mean {statistics.fmean(self.kl):.3g}, largest {max(self.kl):.3g} nats."
        )
        return words if self.same_prompt else f"{words} Its own tokenizer makes other tokens of the question."


def loss(args: EngineArgs, question: Question, unquantized: EngineArgs | None = None) -> Loss:
    """Return what the weights of `args` lose; one model is freed before the other is loaded.

    Args:
        unquantized: selects the unquantized model; by default it is that of `args` without `args.quantization`.

    Raises:
        BeheldError: a model cannot be loaded or cannot answer.
    """
    whole = WatchedEngine(unquantized or dataclasses.replace(args, quantization=None))
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
    return Loss(args.quantization or str(args.model), equal, kl, same_prompt)


def _divergence(want_V: Tensor, got_V: Tensor) -> float:
    """Return the divergence of softmax(got) from softmax(want); ids that neither can give count nothing."""
    size = min(len(want_V), len(got_V))
    p_V, q_V = (each[:size].double().log_softmax(-1) for each in (want_V, got_V))
    terms_V = p_V.exp() * (p_V - q_V)
    return max(0.0, float(terms_V[p_V.exp() > 0].sum()))
