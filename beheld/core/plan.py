"""All that host and device say to each other: the plan of a step, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from beheld.core.params import Sampling
from beheld.core.request import LoRARequest

# Why a row failed: its logits hold no finite candidate; its grammar allows nothing more.
NAN = "nan"
STUCK = "stuck"


@dataclass(frozen=True, eq=False)
class SpanView:
    """A media span as the device needs it: no features, only identity, place and layout.

    `embed_mask` is None when every position of the span takes an embedding. Of an item with `num_states` none does:
    layers of a cross group attend to its states instead.
    """

    modality: str
    digest: bytes
    start: int
    stop: int
    embed_mask: tuple[bool, ...] | None
    num_embeds: int
    layout: Mapping[str, tuple[Any, ...]]
    num_states: int = 0


@dataclass(frozen=True, eq=False)
class Admission:
    """A sequence takes a row: sent once, and again when it resumes after preemption.

    Attributes:
        row: the row it takes, 0 <= row < max_num_seqs.
        token_ids: the prompt, and what was generated before a preemption.
        num_prompt: how many of them are the prompt.
        spans: its media.
        params: how to sample.
        lora: the adapter, if any.
        num_computed: positions whose keys and values are already in the cached blocks below.
        blocks: for each KV group, the block ids that hold those positions (0, the null block, where a sliding group no
            longer needs one).
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt: int
    spans: tuple[SpanView, ...]
    params: Sampling
    lora: LoRARequest | None
    num_computed: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SeqSlice:
    """Compute positions `start` to `stop` (half-open) of a row: the whole scheduling language.

    Prefill, a chunk of it, decoding, the rest after a prefix hit, and a speculative check are all this.

    Attributes:
        row: whose.
        start, stop: which positions.
        new_blocks: for each KV group, block ids appended to the row's table before computing.
        samples: the last position's logits give the next token.
    """

    row: int
    start: int
    stop: int
    new_blocks: tuple[tuple[int, ...], ...]
    samples: bool


@dataclass(frozen=True, eq=False)
class EncodeItem:
    """Run the tower for one item and keep its embeddings, or its states, `num_embeds` of them, under `digest`."""

    digest: bytes
    modality: str
    features: Mapping[str, Any]
    num_embeds: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of the device.

    The device works through it in this order: `released` rows are free, `forget` drops embeddings, `encode` runs
    towers, `admitted` fills rows, `slices` are computed in one batch and those with `samples` give one token each.
    `masks` holds, per row, a bit mask of allowed tokens (32 to a little-endian word).
    """

    id: int
    slices: tuple[SeqSlice, ...]
    admitted: tuple[Admission, ...] = ()
    encode: tuple[EncodeItem, ...] = ()
    released: tuple[int, ...] = ()
    forget: tuple[bytes, ...] = ()
    masks: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Positions computed in this step."""
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself, its rank (from 1), and of the best few."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class StepResult:
    """What the device answers.

    Attributes:
        plan_id: which plan.
        tokens: row -> sampled token id, for every slice with `samples` that did not fail.
        logprobs: row -> log-probabilities of that token, where asked for.
        prompt_logprobs: row -> those of the prompt's tokens at positions start + 1 to stop of the slice, if asked for.
        failed: row -> why this row's result is unusable (NAN, STUCK, or an error's text).
        lost: digests of the plan's `encode` whose embeddings are not on the device.
        encode_s: seconds of towers that ended since the last result.
    """

    plan_id: int
    tokens: Mapping[int, int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[bytes, ...] = ()
    encode_s: float = 0.0
