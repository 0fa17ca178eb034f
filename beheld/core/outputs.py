"""What comes out: token events from the scheduler, request outputs for the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from beheld.core.errors import BeheldError
from beheld.core.media import MediaReceipt
from beheld.core.plan import TokenLogprobs
from beheld.core.request import FinishReason, LoRARequest

if TYPE_CHECKING:
    import numpy as np


class TokenEvent(NamedTuple):
    """What one step gave to one request: new tokens, its vector, or its end.

    Attributes:
        request_id: the request.
        token_ids: the new tokens; none when the event only says that the request has ended (abort, error), or brings
            its vector.
        finish: set on the last event of the request.
        stop_id: the token id that ended it, if one of the request's own stop ids did.
        logprobs: of each new token, where asked for.
        prompt_logprobs: those of the prompt (without its first token), once, where asked for.
        num_cached: prompt tokens that came from the prefix cache; in the first event.
        error: why it failed, when finish is ERROR.
        waited_s: from its arrival at the scheduler to its first step; in the first event.
        pooled: the vector (D), scores (C) or vectors (N, D) of a request that pools, float32.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached: int = 0
    error: BeheldError | None = None
    waited_s: float = 0.0
    pooled: np.ndarray | None = None


@dataclass(slots=True)
class Logprob:
    """One candidate: natural-log probability, rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens: of the prompt, of the answer, and how many of the prompt came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass
class CompletionOutput:
    """One answer. Field names are those of vLLM's class of this name."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """True once the answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All that is known of one request. Field names are those of vLLM's class of this name, and three of ours.

    Attributes:
        media: one receipt per media item: what was given, what the model saw, what was lost.
        error: set when the request failed and `on_error="return"` was asked for; `outputs` is then empty.
        milliseconds: time per stage ("prepare", "first_token", "total"; the last two count from the start), and of
            AsyncLLM also "queue", "prefill" and "decode", which follow one another after "prepare".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    lora_request: LoRARequest | None = None
    media: list[MediaReceipt] = field(default_factory=list)
    error: BeheldError | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    metrics: Any = None

    @property
    def usage(self) -> Usage:
        """Token counts over all answers."""
        prompt = len(self.prompt_token_ids or ())
        return Usage(prompt, sum(len(o.token_ids) for o in self.outputs), self.num_cached_tokens)
