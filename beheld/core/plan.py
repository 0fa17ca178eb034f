"""Everything that host and device say to each other: the plan of a step, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from beheld.core.params import Pooling, Sampling
from beheld.core.request import LoRARequest

if TYPE_CHECKING:
    import numpy as np

# Why a row failed: its logits hold no finite candidate; its grammar allows nothing more.
NAN = "nan"
STUCK = "stuck"
# The most draft tokens of one slice. Whatever a sampler remembers of a row must reach this far back.
MAX_DRAFT_TOKENS = 24


@dataclass(frozen=True, eq=False)
class SpanView:
    """A media span as the device needs it: its identity, place and layout, without features.

    `embed_mask` is None when every position of the span takes an embedding. No position does if the item has
    `num_states`: the layers of a cross group attend to its states instead.
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
    """A sequence takes a row. It is sent once, and again when the sequence resumes after a preemption.

    Attributes:
        row: the row it takes, 0 <= row < max_num_seqs.
        token_ids: the prompt, and what was generated before a preemption.
        num_prompt: how many of them are the prompt.
        spans: its media.
        params: how to sample, or what to pool.
        lora: the adapter, if any.
        num_computed: positions whose keys and values are already in the cached blocks below.
        blocks: for each KV group, the block ids that hold those positions (0, the null block, where a sliding group no
            longer needs one).
    """

    row: int
    token_ids: tuple[int, ...]
    num_prompt: int
    spans: tuple[SpanView, ...]
    params: Sampling | Pooling
    lora: LoRARequest | None
    num_computed: int
    blocks: tuple[tuple[int, ...], ...]


class SeqSlice(NamedTuple):
    """Compute positions `start` to `stop` (half-open) of a row: the whole scheduling language.

    Prefill, a chunk of it, decoding, the rest after a prefix hit, and the check of draft tokens differ in nothing else.

        position        6    7    8    9   10        known so far: 0 to 6, and three draft tokens are to be checked:
        token         newest d0   d1   d2  .         start 6, stop 10, wanted 4, token_ids (newest, d0, d1, d2)
        gives           t7   t8   t9  t10            d0 == t7 and d1 != t8: the device answers with (t7, t8)

    Attributes:
        row: the row whose positions are computed.
        start, stop: the positions.
        new_blocks: for each KV group, block ids appended to the row's table before computing.
        wanted: how many of the last positions give something. Of a row that samples, each gives the token after it, so
            0 means that none is sampled and 1 that one is; more means that the last `wanted - 1` tokens are drafts,
            and the row gives the drafts that are right and one token more. Of a row that pools, hidden states.
        token_ids: with drafts, the ids at the last `wanted` positions: the newest token and the drafts. Empty
            otherwise: the device knows them.
    """

    row: int
    start: int
    stop: int
    new_blocks: tuple[tuple[int, ...], ...]
    wanted: int
    token_ids: tuple[int, ...] = ()


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

    The device works through it in this order: `released` rows become free, `forget` drops embeddings, `encode` runs
    towers, `admitted` fills rows, and `slices` are computed in one batch. `masks` holds, for each row under a grammar,
    one bit mask of allowed tokens (32 to a little-endian word) for each of its wanted positions.
    """

    id: int
    slices: tuple[SeqSlice, ...]
    admitted: tuple[Admission, ...] = ()
    encode: tuple[EncodeItem, ...] = ()
    released: tuple[int, ...] = ()
    forget: tuple[bytes, ...] = ()
    masks: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)

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
        plan_id: the plan that was carried out.
        tokens: row -> sampled token ids, for every sampling slice with `wanted` positions: the drafts that are right,
            and one more token. A row that failed has those from before the failure, or no entry.
        logprobs: row -> log-probabilities of each of these tokens, where asked for.
        prompt_logprobs: row -> those of the prompt's tokens at positions start + 1 to stop of the slice, if asked for.
        pooled: row -> the vector (D), scores (C) or vectors (N, D) of a prompt whose last position was computed.
        draft_ids: row -> token ids that the runner expects to follow; none from a runner that does not speculate.
        failed: row -> why this row cannot go on (NAN, STUCK, or an error's text).
        culprits: those of them that failed while they were computed alone, after their step had failed.
        lost: digests of the plan's `encode` whose embeddings are not on the device.
        encode_s: seconds of towers that ended since the last result.
    """

    plan_id: int
    tokens: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: Mapping[int, np.ndarray] = field(default_factory=dict)
    draft_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    culprits: frozenset[int] = frozenset()
    lost: tuple[bytes, ...] = ()
    encode_s: float = 0.0
