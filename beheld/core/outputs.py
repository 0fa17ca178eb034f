"""The engine's outputs: token events from the scheduler, request outputs for the user."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from beheld.core.errors import BeheldError
from beheld.core.grounding import GroundedObject
from beheld.core.media import MediaReceipt
from beheld.core.plan import PromptLogprobs, TokenLogprobs
from beheld.core.request import FinishReason, LoRARequest

if TYPE_CHECKING:
    import numpy as np


class TokenEvent(NamedTuple):
    """The outcome of one step for one request: new tokens, its vector, or its end.

    Attributes:
        request_id: the request.
        token_ids: the new tokens; empty if the event only ends the request (abort, error) or carries its vector.
        finish: set on the request's last event.
        stop_id: the token id that ended the request, if it is one of the request's own stop ids.
        logprobs: log-probabilities of each new token, if requested.
        prompt_logprobs: log-probabilities of the prompt without its first token, once, if requested.
        num_cached: prompt tokens that came from the prefix cache; set in the first event.
        error: why the request failed, if `finish` is ERROR.
        waited_s: seconds from arrival at the scheduler to the first step; set in the first event.
        pooled: the vector (D), scores (C) or vectors (N, D) of a pooling request, float32.
        restarted: the engine died, and another one starts the answer again: all earlier tokens of the request are void.
        num_preemptions: how often it was interrupted until then, once after each time; otherwise 0.
        num_external: how many of `num_cached` were kept outside of the engine.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    num_cached: int = 0
    error: BeheldError | None = None
    waited_s: float = 0.0
    pooled: np.ndarray | None = None
    restarted: bool = False
    num_preemptions: int = 0
    num_external: int = 0


@dataclass(slots=True)
class Logprob:
    """One candidate: its natural-log probability (or what the engine's `logprobs_mode` says), rank from 1, and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class PromptEntries(Protocol):
    """The entries of `RequestOutput.prompt_logprobs`, made when they are read, since all together are large."""

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        """One position after another."""

    def best(self, num_top: int) -> PromptEntries:
        """The same with no more than `num_top` candidates besides the token itself."""


@dataclass(frozen=True)
class Usage:
    """Token counts: the prompt, the answer, and the part of the prompt that came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass
class CompletionOutput:
    """One answer. Field names follow vLLM's class of the same name, with one addition.

    Attributes:
        logprobs: of each token, the candidates by their ids; FlatLogprobs where `flat_logprobs` asks for that.
        grounding: what a finished answer located in images, in their pixels; None unless it was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    grounding: list[GroundedObject] | None = None

    def finished(self) -> bool:
        """True once the answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """When the parts of a request happened, in seconds; vLLM's names.

    Attributes:
        num_generation_tokens: tokens of all answers so far.
        arrival_time: when the request came, since the epoch.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: by a monotonic clock: when it was prepared and handed to
            the scheduler, when its first step began, and when its first and its last token came.
        first_token_latency: from the arrival to the first token.
        num_answers, max_answer_tokens, max_tokens, finish_reasons, num_preemptions: of our own, in the last output: how
            many answers there are, the tokens of the longest, the most that one may have, why they ended, and how often
            they were interrupted.
    """

    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    is_corrupted: bool = False
    num_answers: int = 1
    max_answer_tokens: int = 0
    max_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    num_preemptions: int = 0


def metrics_of(
    num_tokens: int, started: float, prepared: float, waited_s: float, first_token: float | None, now: float
) -> RequestMetrics:
    """The metrics of a request, from times of the monotonic clock."""
    first = now if first_token is None else first_token
    scheduled = min(prepared + waited_s, first)
    # `now` is the present, so the wall clock gives the arrival's time.
    arrival = time.time() - (now - started)
    return RequestMetrics(num_tokens, arrival, prepared, scheduled, first, now, first - started)


@dataclass
class RequestOutput:
    """The state of one request, finished or not.

    Field names follow vLLM's class of the same name, with four additions.

    Attributes:
        prompt_token_id_logprobs: (rows, N), float32, of the tokens in `prompt_logprob_token_ids`; minus infinity for
            -1.
        prompt_entries: what `prompt_logprobs` would hold, in its place where AsyncLLM was asked for that.
        num_external_tokens: how many of `num_cached_tokens` were taken from a folder, see `kv_transfer_config`.
        media: one receipt per media item: the input, what the model saw, what was lost.
        error: why the request failed, with `on_error="return"`; `outputs` is then empty.
        milliseconds: time per stage ("prepare", "first_token", "total"; the last two count from the start). AsyncLLM
            adds "queue", "prefill" and "decode", which follow one another after "prepare".
        metrics: the same times under vLLM's names.
        encoder_prompt, encoder_prompt_token_ids: always None: what an encoder reads stands in `media`, and its text is
            that of the request.
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
    metrics: RequestMetrics | None = None
    prompt_entries: PromptEntries | None = None
    prompt_token_id_logprobs: np.ndarray | None = None
    num_external_tokens: int = 0

    encoder_prompt: ClassVar[str | None] = None
    encoder_prompt_token_ids: ClassVar[list[int] | None] = None

    @property
    def num_cache_creation_tokens(self) -> int:
        """Prompt tokens that no cached prefix covered: they were computed, and later prompts may share them."""
        return max(0, len(self.prompt_token_ids or ()) - self.num_cached_tokens)

    @property
    def usage(self) -> Usage:
        """Token counts over all answers."""
        prompt = len(self.prompt_token_ids or ())
        return Usage(prompt, sum(len(o.token_ids) for o in self.outputs), self.num_cached_tokens)


@dataclass
class PoolingOutput:
    """What pooling made of a prompt: a vector (D) or scores (C), or those of each position (N, D), float32."""

    data: Any


@dataclass
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """A prompt's scores, one for each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts go together."""

    score: float


P = TypeVar("P", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass
class PooledRequestOutput(Generic[P]):
    """The result of a request that pools. Field names follow vLLM's class PoolingRequestOutput.

    Attributes:
        outputs: what was made of the prompt; None if the request failed.
        media, error, milliseconds: see RequestOutput.
    """

    request_id: str
    outputs: P
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    prompt: str | None = None
    lora_request: LoRARequest | None = None
    media: list[MediaReceipt] = field(default_factory=list)
    error: BeheldError | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def usage(self) -> Usage:
        """Token counts."""
        return Usage(len(self.prompt_token_ids), 0, self.num_cached_tokens)


@dataclass
class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """A request of `encode`: `outputs.data` holds what was pooled."""


@dataclass
class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """A request of `embed`: `outputs.embedding` is the vector."""

    @classmethod
    def of_values(cls, values: np.ndarray) -> EmbeddingOutput:
        """The vector."""
        return EmbeddingOutput(values.tolist())

    @classmethod
    def of(cls, pooled: PoolingRequestOutput) -> EmbeddingRequestOutput:
        """The vector of a request."""
        return _as(cls, pooled)


@dataclass
class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """A request of `classify`: `outputs.probs` are the scores of the classes."""

    @classmethod
    def of_values(cls, values: np.ndarray) -> ClassificationOutput:
        """The scores."""
        return ClassificationOutput(values.tolist())

    @classmethod
    def of(cls, pooled: PoolingRequestOutput) -> ClassificationRequestOutput:
        """The scores of a request."""
        return _as(cls, pooled)


@dataclass
class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """A pair of `score`: `outputs.score` says how well its texts go together."""

    @classmethod
    def of_values(cls, values: np.ndarray) -> ScoringOutput:
        """The one score."""
        return ScoringOutput(float(values.reshape(-1)[0]))

    @classmethod
    def of(cls, pooled: PoolingRequestOutput) -> ScoringRequestOutput:
        """The one score of a request."""
        return _as(cls, pooled)


def _as(kind: Any, pooled: PoolingRequestOutput) -> Any:
    """The same result in another class; a request that failed has no outputs."""
    found = object.__new__(kind)
    # Both classes have the same fields.
    found.__dict__.update(vars(pooled))
    # Of a tensor's own lists each number is made alone.
    found.outputs = None if pooled.error is not None else kind.of_values(pooled.outputs.data.numpy())
    return found
