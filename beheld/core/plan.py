"""The messages between host and device: the plan of a step and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from beheld.core.pooling_params import Pooling
from beheld.core.request import LoRARequest
from beheld.core.sampling import Sampling

if TYPE_CHECKING:
    import numpy as np

# Why a row failed: its logits hold no finite candidate, or its grammar allows no token.
NAN = "nan"
STUCK = "stuck"
# The most draft tokens in one slice. A sampler remembers at least this many past tokens of a row.
MAX_DRAFT_TOKENS = 24
# Bounds by which statistics count the positions that a step computes.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Positions of a prompt that are turned into objects at once.
_AT_A_TIME = 256


@dataclass(frozen=True, eq=False)
class SpanView:
    """A media span as the device needs it: identity, position and layout, without features.

    `embed_mask` is None if every position of the span takes an embedding. If the item has `num_states`, no position
    takes one: the layers of a cross group attend to the item's states instead.
    """

    modality: str
    digest: bytes
    start: int
    stop: int
    embed_mask: tuple[bool, ...] | None
    num_embeds: int
    layout: Mapping[str, tuple[Any, ...]]
    num_states: int = 0


class Admission(NamedTuple):
    """A sequence takes a row. The plan carries it once, and again when the sequence resumes after a preemption.

    Attributes:
        row: the row, 0 <= row < max_num_seqs.
        token_ids: the prompt, and the tokens generated before a preemption.
        num_prompt: number of prompt tokens.
        spans: the media.
        params: sampling or pooling parameters.
        lora: the adapter, if any.
        num_computed: number of positions whose keys and values are in `blocks`.
        blocks: for each KV group, the block ids that hold these positions (0, the null block, where a sliding group no
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
    """Compute positions `start` to `stop` (half-open) of a row: the only unit of scheduling.

    Prefill, chunked prefill, decoding, the rest after a prefix hit and the check of draft tokens are all slices.

        position        6    7    8    9   10        known so far: 0 to 6, and three draft tokens are to be checked:
        token         newest d0   d1   d2  .         start 6, stop 10, wanted 4, token_ids (newest, d0, d1, d2)
        gives           t7   t8   t9  t10            d0 == t7 and d1 != t8: the device answers with (t7, t8)

    Attributes:
        row: the row.
        start, stop: the positions.
        new_blocks: for each KV group, block ids appended to the row's table before computing.
        wanted: number of last positions with an output. In a sampling row each gives the next token: 0 samples nothing
            and 1 samples one token; with more, the last `wanted - 1` tokens are drafts, and the row gives the correct
            drafts and one further token. In a pooling row each gives its hidden state.
        token_ids: with drafts, the ids at the last `wanted` positions: the newest token and the drafts. Otherwise
            empty: the device has them.
    """

    row: int
    start: int
    stop: int
    new_blocks: tuple[tuple[int, ...], ...]
    wanted: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class EncodeItem:
    """Run the tower on one item and keep its `num_embeds` embeddings, or states, under `digest`."""

    digest: bytes
    modality: str
    features: Mapping[str, Any]
    num_embeds: int


@dataclass(frozen=True, eq=False)
class BlockLoad:
    """Fill blocks with what was kept of them outside of the engine.

    Attributes:
        blocks: for each KV group, the N block ids.
        data: the bytes of each of the N blocks, over all groups, see runner/block_bytes.py.
    """

    blocks: tuple[tuple[int, ...], ...]
    data: tuple[np.ndarray, ...]


class BlockKeep(NamedTuple):
    """Bring what is in blocks, once the step has computed it, to the host.

    Attributes:
        row: the row whose slice completes them.
        first: index of the first of them in the row's tables.
        blocks: for each KV group, the N block ids.
    """

    row: int
    first: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step of the device.

    The device executes it in this order: free the `released` rows, drop the embeddings in `forget`, run towers on
    `encode`, fill the `admitted` rows, `load` blocks, compute `slices` in one batch, and bring blocks in `keep` to the
    host. `masks` holds, for each row with a grammar, one bit mask of allowed tokens (32 per little-endian word) for
    each wanted position.
    """

    id: int
    slices: tuple[SeqSlice, ...]
    admitted: tuple[Admission, ...] = ()
    encode: tuple[EncodeItem, ...] = ()
    released: tuple[int, ...] = ()
    forget: tuple[bytes, ...] = ()
    masks: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    load: tuple[BlockLoad, ...] = ()
    keep: tuple[BlockKeep, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of positions that this step computes."""
        return sum(s.stop - s.start for s in self.slices)


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, its rank from 1, and those of the best few."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities at T positions of a prompt, as columns.

    Columns, because objects take far more memory, and those of many long prompts wait in the engine for their answers.

    Attributes:
        token_ids: (T), int32.
        logprobs: (T), float32.
        ranks: (T), from 1, int32.
        top_ids, top_logprobs: (T, K), of the best K, int32 and float32.
        named_logprobs: (T, N), of tokens that the request names, float32; None if it names none.

    Raises:
        ValueError: the columns differ in length.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    named_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        shapes = {column.shape for column in (self.token_ids, self.logprobs, self.ranks)}
        if shapes != {self.top_ids.shape[:1]} or self.top_ids.shape != self.top_logprobs.shape:
            raise ValueError("the columns of log-probabilities differ in length")
        if self.named_logprobs is not None and self.named_logprobs.shape[:1] != self.token_ids.shape:
            raise ValueError("the columns of log-probabilities differ in length")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """One position after another; only a few exist as objects at the same time."""
        for start in range(0, len(self), _AT_A_TIME):
            columns = [column.tolist() for column in self._columns(slice(start, start + _AT_A_TIME))]
            for token, logprob, rank, top_ids, top_logprobs in zip(*columns, strict=True):
                yield TokenLogprobs(token, logprob, rank, tuple(top_ids), tuple(top_logprobs))

    @staticmethod
    def position_bytes(num_top: int) -> int:
        """Bytes of one position with so many candidates."""
        return 12 + 8 * num_top

    def since(self, start: int) -> PromptLogprobs:
        """Those at positions from `start` on."""
        named = None if self.named_logprobs is None else self.named_logprobs[start:]
        return replace(PromptLogprobs(*self._columns(slice(start, None))), named_logprobs=named)

    @staticmethod
    def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Those of consecutive parts, which have the same K and N; of none, those of no position."""
        import numpy as np

        if not parts:
            ids, values = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return PromptLogprobs(ids, values, ids, ids.reshape(0, 0), values.reshape(0, 0))
        columns = zip(*(part._columns(slice(None)) for part in parts), strict=True)
        named = [part.named_logprobs for part in parts if part.named_logprobs is not None]
        joined = np.concatenate(named) if named else None
        return replace(PromptLogprobs(*map(np.concatenate, columns)), named_logprobs=joined)

    def _columns(self, place: slice) -> list[np.ndarray]:
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return [column[place] for column in columns]


@dataclass(frozen=True, eq=False)
class StepResult:
    """The device's result of one step.

    Attributes:
        plan_id: the plan.
        tokens: row -> sampled token ids, for every sampling slice with `wanted` positions: the correct drafts and one
            further token. A failed row has the tokens from before the failure, or no entry.
        logprobs: row -> log-probabilities of each of these tokens, if requested.
        prompt_logprobs: row -> log-probabilities of the prompt tokens at positions start + 1 to stop of the slice, if
            requested.
        pooled: row -> the vector (D), scores (C) or vectors (N, D) of a prompt whose last position was computed.
        draft_ids: row -> token ids that the runner predicts to follow; empty without speculation.
        failed: row -> why the row cannot continue (NAN, STUCK, or an error's text).
        culprits: the failed rows that, after their step had failed, failed again when run alone.
        redone: row -> why its step failed, if its sequence must be computed again because recurrent layers had already
            changed its states.
        kept: row -> the bytes of its N blocks in `keep`, in parts (N, bytes of the part), uint8.
        lost: digests in `encode` whose embeddings are not on the device.
        encode_s: seconds of tower runs that ended since the last result.
    """

    plan_id: int
    tokens: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    pooled: Mapping[int, np.ndarray] = field(default_factory=dict)
    draft_ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[bytes, ...] = ()
    encode_s: float = 0.0
    culprits: frozenset[int] = frozenset()
    redone: Mapping[int, str] = field(default_factory=dict)
    kept: Mapping[int, tuple[np.ndarray, ...]] = field(default_factory=dict)
