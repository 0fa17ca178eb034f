"""A device made of integers, which checks all that it is told, and builders of small configurations and requests.

The next token of a sequence is a function of its tokens and of its media's digests alone (`next_token`), so that the
whole answer to a request can be computed by hand (`expected_tokens`), and any wrong block, early release, bad prefix
hit or missing embedding changes it, or is caught on the spot.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from beheld.core.config import Capacity, EngineConfig, KVGroup, ModelInfo, StateShape
from beheld.core.errors import EngineDeadError
from beheld.core.media import MediaItem, MediaSpan
from beheld.core.plan import (
    Admission,
    BlockKeep,
    BlockLoad,
    PromptLogprobs,
    SeqSlice,
    SpanView,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from beheld.core.pooling_params import Pooling
from beheld.core.request import LoRARequest, Request
from beheld.core.sampling import Sampling
from beheld.core.sleep import EnginePart
from beheld.executor.executor import ModelSize, Watch
from tests.fake_caches import KINDS, Cell, FakePaged, Read

VOCAB = 97
PLACEHOLDER = 90
_MASK = (1 << 61) - 1

FULL = KVGroup("full", (0,), 1, 8, 8)
LATENT = KVGroup("latent", (6,), 1, 12, 8, values_in_keys=True)
CROSS = KVGroup("cross", (3,), 1, 8, 8, num_states=12)


def sliding(window: int) -> KVGroup:
    """A sliding group of that window."""
    return KVGroup("sliding", (2,), 1, 8, 8, window)


def chunked(length: int) -> KVGroup:
    """A group of chunks of that length."""
    return KVGroup("chunked", (2,), 1, 8, 8, length)


def conv(length: int) -> KVGroup:
    """A group of convolutions over that many positions."""
    return KVGroup("conv", (5,), 1, 8, 0, length)


def recurrent(checkpoint_tokens: int = 512) -> KVGroup:
    """A recurrent group that keeps a state for others every so many positions, and where prompts have edges."""
    return KVGroup("recurrent", (6,), 0, 0, 0, state=StateShape((2,), 3, 4), checkpoint_tokens=checkpoint_tokens)


Beside = list[tuple[int, bytes]]
"""Where items with states stand, and their digests."""


# ---- the model, by hand ----------------------------------------------------------------------------------------------


def mix(state: int, value: int) -> int:
    """The state after one more value; depends on all values before."""
    return (state * 6364136223846793005 + value * 1442695040888963407 + 1013904223) & _MASK


def first_state(lora: LoRARequest | None, beside: Beside) -> int:
    """The state before any token: positions before the first item with states attend to all of them."""
    state = 1 if lora is None else 1 + lora.lora_int_id
    for digest in [digest for _, digest in beside] if beside and beside[0][0] > 0 else ():
        state = mix(state, embed_value(digest, 0))
    return state


def next_token(state: int, mask: bytes | None = None) -> int:
    """What is sampled in a state, of the tokens that the bit mask of a grammar allows."""
    token = (state >> 30) % VOCAB
    if mask is None:
        return token
    allowed = [token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1]
    return allowed[token % len(allowed)]


def no_drafts(state: int, most: int) -> tuple[int, ...]:
    """The tokens that a runner expects to follow a state, `most` of them at most: this one expects nothing."""
    return ()


def half_right(state: int, most: int) -> tuple[int, ...]:
    """Four tokens at most, of which the first two are right."""
    made: list[int] = []
    for place in range(min(4, most)):
        token = next_token(state)
        made.append(token if place < 2 else (token + 1) % VOCAB)
        state = mix(state, token)
    return tuple(made)


def now_and_then_right(state: int, most: int) -> tuple[int, ...]:
    """Any number of tokens, of which any number are right."""
    count, right = (state >> 7) % (most + 1), (state >> 17) % (most + 1)
    made: list[int] = []
    for place in range(count):
        token = next_token(state)
        made.append(token if place < right else (token + 1) % VOCAB)
        state = mix(state, token)
    return tuple(made)


def expected_vector(request: Request) -> list[float]:
    """What a request that pools gives: a number for each state that its method reads."""
    assert isinstance(request.params, Pooling)
    return pooled(states_of(request), request.params)


def pooled(states: list[int], params: Pooling) -> list[float]:
    """The vector of a prompt, from the states after each of its positions."""
    numbers = [float(state % 10_007) for state in states]
    if params.method == "mean":
        return [sum(numbers) / len(numbers)]
    return {"last": numbers[-1:], "cls": numbers[:1], "all": numbers}[params.method]


def embed_value(digest: bytes, index: int) -> int:
    """What embedding `index` of an item adds; never equal to a token."""
    return mix(int.from_bytes(digest[:7], "big"), index) | 1 << 40


def expected_tokens(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The answer to a request and why it ends ("stop" or "length"), computed without scheduler or blocks."""
    state = states_of(request)[-1]
    output: list[int] = []
    params = request.params
    assert isinstance(params, Sampling)
    while True:
        token = next_token(state)
        output.append(token)
        state = mix(state, token)
        if token in params.stop_ids and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) == params.max_tokens or len(request.token_ids) + len(output) == max_model_len:
            return output, "length"


def states_of(request: Request) -> list[int]:
    """The states after each position of the prompt."""
    embeds = {}
    for span in request.spans:
        mask = span.item.embed_mask or (True,) * (span.stop - span.start)
        places = [span.start + offset for offset, takes in enumerate(mask) if takes]
        embeds.update({place: embed_value(span.item.digest, index) for index, place in enumerate(places)})
    beside = [(span.start, span.item.digest) for span in request.spans if span.item.num_states]
    embeds |= {place: embed_value(digest, 0) for place, digest in beside}
    states, state = [], first_state(request.lora, beside)
    for position, token in enumerate(request.token_ids):
        state = mix(state, embeds.get(position, token))
        states.append(state)
    return states


# ---- the device ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeRow:
    """What the device knows of one sequence.

    Attributes:
        states: `states[i]` is the state after position i - 1.
        broken: its newest keys and values are not numbers.
        parts: of a row that pools, by their first position, the states that slices have given to its pool.
    """

    admission: Admission
    token_ids: list[int]
    states: list[int]
    tables: list[list[int]]
    num_computed: int
    broken: bool = False
    embeds: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    beside: set[bytes] = field(default_factory=set)
    parts: dict[int, list[int]] = field(default_factory=dict)


class FakeRunner:
    """Carries out plans, in the order given, and asserts that each is one that a real device could carry out.

    With `verify`, each group keeps what was written as its kind does (tests/fake_caches.py), and each slice reads its
    whole context back through its own tables. Without, only tokens are computed, which costs little.

    Attributes:
        broken_tokens: a position with one of these ids gets broken keys and values, and so does whatever reads them.
        broken_digests: items whose tower fails.
        drafts: gives the draft tokens that it expects to follow a state; without, it does not speculate.
        num_accepted, num_rejected: draft tokens that were right, and those that were not.
        num_computed: positions computed so far.
        num_encoded: items encoded so far.
        tell_loss: what the engine wants called when the device is lost.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, capacity: Capacity, *, verify: bool = True) -> None:
        self.config, self.info, self.capacity = config, info, capacity
        self.verify = verify
        self.broken_tokens: set[int] = set()
        self.broken_digests: set[bytes] = set()
        self.drafts: Callable[[int, int], tuple[int, ...]] = no_drafts
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_computed = 0
        self.num_encoded = 0
        self.tell_loss: Callable[[], None] | None = None
        self._rows: dict[int, FakeRow] = {}
        self._caches = [
            KINDS[spec.kind](spec, count, config.block_size)
            for spec, count in zip(info.kv_groups, capacity.num_blocks, strict=True)
        ]
        self._embeds: dict[bytes, int] = {}
        self._results: deque[StepResult] = deque()
        self._last_plan: int | None = None

    def forget(self) -> None:
        """Be a new device."""
        self._rows.clear()
        self._caches = [
            KINDS[spec.kind](spec, count, self.config.block_size)
            for spec, count in zip(self.info.kv_groups, self.capacity.num_blocks, strict=True)
        ]
        self._embeds.clear()

    # The device side of the executor's protocol.

    def launch(self, plan: StepPlan) -> StepPlan:
        """Compute at once what a real device computes later; the result is given out by collect.

        A plan may come again in parts, one sequence each, which is how the engine finds the culprit of a failed step.
        """
        assert self._last_plan is None or plan.id >= self._last_plan, "plans go to the device in order"
        again = plan.id == self._last_plan
        most = max(1, self.config.pipeline_parallel_size - 1)
        assert len(self._results) <= most, "too many steps are in flight when another is launched"
        self._last_plan = plan.id
        self._check_plan(plan)
        for freed in plan.released:
            assert freed in self._rows, f"row {freed} is released and holds nothing"
            del self._rows[freed]
        for digest in plan.forget:
            assert digest in self._embeds or digest in self.broken_digests, "told to forget what is not there"
            self._embeds.pop(digest, None)
        for load in plan.load:
            self._load(load)
        for admission in plan.admitted:
            self._admit(admission)
        lost = self._encode(plan, again=again)
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        vectors: dict[int, np.ndarray] = {}
        drafts: dict[int, tuple[int, ...]] = {}
        prompt: dict[int, PromptLogprobs] = {}
        failed: dict[int, str] = {}
        used: set[bytes] = set()
        # As on a real device, the whole batch writes its keys and values before any of it reads.
        missing = {piece.row: self._begin(self._rows[piece.row], piece, used) for piece in plan.slices}
        for piece in plan.slices if self.verify else ():
            self._write(self._rows[piece.row], piece)
        for piece in plan.slices:
            row = self._rows[piece.row]
            if self.verify:
                self._read(row, piece)
            params = row.admission.params
            if missing[piece.row]:
                failed[piece.row] = "The embeddings are not on the device."
            if isinstance(params, Pooling):
                vector = self._pool(row, piece, params)
                if vector is not None and row.broken:
                    failed.setdefault(piece.row, "nan")
                elif vector is not None:
                    vectors[piece.row] = vector
                continue
            if piece.wanted:
                # A broken row has a next token too, on the device: a step that was planned already will compute it.
                given, broken = self._sample(row, piece, plan.masks.get(piece.row))
                if broken:
                    failed.setdefault(piece.row, "nan")
                if given and not missing[piece.row]:
                    tokens[piece.row] = given
                    if params.logprobs is not None:
                        logprobs[piece.row] = tuple(map(fake_logprobs, given))
                most = self.config.num_draft_tokens
                drafts[piece.row] = self.drafts(row.states[-1], most) if most else ()
            if params.prompt_logprobs is not None:
                last = min(piece.stop + 1, row.admission.num_prompt)
                told = [*map(fake_logprobs, row.token_ids[piece.start + 1 : last])]
                prompt[piece.row] = prompt_columns(told)
        encoded = {item.digest for item in plan.encode}
        assert again or encoded <= used | set(lost), "something was encoded that no slice uses"
        kept = {keep.row: self._keep(keep) for keep in plan.keep} if self.verify else {}
        self._results.append(StepResult(plan.id, tokens, logprobs, prompt, vectors, drafts, failed, lost, kept=kept))
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        """The result of the oldest step that has not been read."""
        result = self._results.popleft()
        assert result.plan_id == handle.id, "results are read in order"
        return result

    def missing(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """Those whose embeddings are not here."""
        return tuple(digest for digest in digests if digest not in self._embeds)

    def on_loss(self, tell: Callable[[], None]) -> None:
        """See Executor; a test calls it."""
        self.tell_loss = tell

    def check_sleeps(self) -> None:
        """It can."""

    def sleep(self, level: int) -> None:
        """The device forgets all that it has."""
        self.forget()

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """There is nothing to read."""

    def close(self) -> None:
        """Nothing to give back."""

    # What it checks and does.

    def _check_plan(self, plan: StepPlan) -> None:
        rows = [piece.row for piece in plan.slices]
        assert rows, "a plan computes something"
        assert len(set(rows)) == len(rows), "one slice for each row"
        assert plan.num_tokens <= self.config.max_num_batched_tokens, "over the budget"
        assert {admission.row for admission in plan.admitted} <= set(rows), "admitted without a slice"
        assert len(set(plan.released)) == len(plan.released), "a row is released twice"
        staying = [row.admission for number, row in self._rows.items() if number not in plan.released]
        loras = {admission.lora for admission in (*staying, *plan.admitted)} - {None}
        assert len(loras) <= self.config.max_loras, "more adapters than slots"

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.row < self.config.max_num_seqs
        assert admission.row not in self._rows, f"row {admission.row} is taken"
        known = len(admission.token_ids)
        assert 0 < admission.num_prompt <= known
        pools = isinstance(admission.params, Pooling)
        assert known <= self.config.max_model_len if pools else known < self.config.max_model_len
        assert 0 <= admission.num_computed < known, "the last known token is always computed"
        assert admission.num_computed % self.config.block_size == 0
        blocks = [list(table) for table in admission.blocks]
        for cache, table in zip(self._caches, blocks, strict=True):
            cache.admit(table, admission.num_computed)
        row = FakeRow(admission, list(admission.token_ids), [], blocks, admission.num_computed)
        for span in admission.spans:
            row.embeds.update(_embed_places(span))
        beside = [(span.start, span.digest) for span in admission.spans if span.num_states]
        row.embeds |= {place: (digest, 0) for place, digest in beside}
        row.beside.update(digest for _, digest in beside)
        state = first_state(admission.lora, beside)
        row.states = [state]
        for position in range(known):
            row.states.append(mix(row.states[-1], _value(row, position)))
        self._rows[admission.row] = row

    def _load(self, load: BlockLoad) -> None:
        for place, data in enumerate(load.data):
            for cache, blocks, part in zip(self._caches, load.blocks, np.split(data, len(self._caches)), strict=True):
                assert isinstance(cache, FakePaged)
                cache.fill(blocks[place], part)

    def _keep(self, keep: BlockKeep) -> tuple[np.ndarray, ...]:
        table = self._rows[keep.row].tables
        for blocks, own in zip(keep.blocks, table, strict=True):
            assert own[keep.first : keep.first + len(blocks)] == list(blocks), "blocks of another sequence"
        parts = []
        for cache, blocks in zip(self._caches, keep.blocks, strict=True):
            assert isinstance(cache, FakePaged)
            parts.append(np.stack([cache.bytes_of(block) for block in blocks]))
        return tuple(parts)

    def _encode(self, plan: StepPlan, *, again: bool) -> tuple[bytes, ...]:
        lost = []
        for item in plan.encode:
            if again and item.digest in self._embeds:
                continue
            assert item.digest not in self._embeds, "an item is encoded although its embeddings are there"
            if item.digest in self.broken_digests:
                lost.append(item.digest)
                continue
            self._embeds[item.digest] = item.num_embeds
            self.num_encoded += 1
        assert sum(self._embeds.values()) <= self.capacity.max_encoder_tokens, "too many embeddings"
        return tuple(lost)

    def _begin(self, row: FakeRow, piece: SeqSlice, used: set[bytes]) -> bool:
        """Check the slice and give it its blocks; True if embeddings are missing."""
        assert piece.start == row.num_computed, "slices are contiguous"
        known = len(row.token_ids)
        drafts = piece.token_ids[1:]
        if piece.token_ids:
            assert len(drafts) <= self.config.num_draft_tokens
            assert (piece.start, piece.stop) == (known - 1, known + len(drafts)), "drafts follow the newest token"
            assert piece.token_ids[0] == row.token_ids[-1], "the newest token is another"
            assert piece.wanted == len(piece.token_ids) > 1, "each draft and the newest token give one"
            row.token_ids += drafts
            for token in drafts:
                row.states.append(mix(row.states[-1], token))
        assert piece.start < piece.stop <= known + len(drafts), "only known tokens can be computed"
        params = row.admission.params
        if isinstance(params, Pooling):
            reads = piece.stop - piece.start if params.reads_all else int(piece.stop == known)
            assert piece.wanted == reads, "a pool gets what its method reads"
            assert known == row.admission.num_prompt, "what pools samples nothing"
        elif not drafts:
            assert piece.wanted == (piece.stop == known), "the last known position samples, no other"
        self.num_computed += piece.stop - piece.start
        for cache, table, blocks in zip(self._caches, row.tables, piece.new_blocks, strict=True):
            cache.append(table, blocks, piece.stop)
        row.num_computed = piece.stop
        missing = bool(row.admission.spans) and self._use_embeds(row, piece, used)
        row.broken |= missing
        for cache, table in zip(self._caches, row.tables, strict=True) if self.verify else ():
            row.broken |= self._any_broken(row, cache.before(table, piece.start))
        return missing

    def _use_embeds(self, row: FakeRow, piece: SeqSlice, used: set[bytes]) -> bool:
        # States are attended to from every position.
        used |= row.beside
        missing = not row.beside <= self._embeds.keys()
        assert not missing or self.broken_digests, "states are used that are not there"
        for span in row.admission.spans:
            if self.info.atomic_spans:
                for edge in (piece.start, piece.stop):
                    if span.start < edge < span.stop:
                        takes = span.embed_mask or (True,) * (span.stop - span.start)
                        inside = takes[edge - span.start - 1] and takes[edge - span.start]
                        assert not inside, "a span that must be whole was cut"
            takes_any = any(span.start <= p < span.stop and p in row.embeds for p in range(piece.start, piece.stop))
            if takes_any and not span.num_states:
                used.add(span.digest)
                if span.digest not in self._embeds:
                    assert self.broken_digests, "embeddings are used that were not encoded"
                    missing = True
        return missing

    def _write(self, row: FakeRow, piece: SeqSlice) -> None:
        """What the slice makes of its positions, into every group; what is broken breaks all that follows."""
        cells = []
        for position in range(piece.start, piece.stop):
            row.broken |= row.token_ids[position] in self.broken_tokens
            cells.append(Cell(row.states[position + 1], row.broken))
        for cache, table in zip(self._caches, row.tables, strict=True):
            cache.write(table, piece.start, cells)

    def _read(self, row: FakeRow, piece: SeqSlice) -> None:
        """Read what the slice sees once all of the step is written."""
        for cache, table in zip(self._caches, row.tables, strict=True):
            self._any_broken(row, cache.after(table, piece.start, piece.stop))

    def _any_broken(self, row: FakeRow, cells: Iterator[Read]) -> bool:
        """Whether one of the cells is broken; each must be of the sequence's own true prefix."""
        broken = False
        for cell, position in cells:
            assert cell.state == row.states[position + 1], "what is read is somebody else's"
            broken |= cell.broken
        return broken

    def _sample(self, row: FakeRow, piece: SeqSlice, masks: tuple[bytes, ...] | None) -> tuple[tuple[int, ...], bool]:
        """The tokens that a slice gives, and whether there would be one more if it were not broken.

        Afterwards the row is as if wrong drafts had never been computed.
        """
        drafts, before = piece.token_ids[1:], piece.stop - len(piece.token_ids[1:])
        assert masks is None or len(masks) == piece.wanted, "a mask for each token that is sampled"
        given: list[int] = []
        broken = False
        for depth in range(piece.wanted):
            if depth and drafts[depth - 1] != given[-1]:
                break
            broken = self._is_broken(row, before + depth - 1) if drafts and self.verify else row.broken
            if broken:
                break
            given.append(next_token(row.states[before + depth], masks[depth] if masks else None))
        right = max(0, len(given) - 1)
        self.num_accepted += right
        self.num_rejected += len(drafts) - right
        kept = before + right
        del row.token_ids[kept:], row.states[kept + 1 :]
        for cache, table in zip(self._caches, row.tables, strict=True):
            if kept < piece.stop:
                cache.truncate(table, kept)
        row.num_computed = kept
        token = next_token(row.states[-1]) if broken else given[right]
        row.token_ids.append(token)
        row.states.append(mix(row.states[-1], token))
        row.broken = broken
        return tuple(given), broken

    def _is_broken(self, row: FakeRow, position: int) -> bool:
        """Whether a position sees something broken, itself included."""
        return any(
            self._any_broken(row, cache.after(table, position, position + 1))
            for cache, table in zip(self._caches, row.tables, strict=True)
        )

    def _pool(self, row: FakeRow, piece: SeqSlice, params: Pooling) -> np.ndarray | None:
        """The vector, once the last position is there; positions that nobody has given to the pool are missed."""
        if piece.wanted:
            row.parts[piece.stop - piece.wanted] = row.states[piece.stop - piece.wanted + 1 : piece.stop + 1]
        if piece.stop < row.admission.num_prompt:
            return None
        states = [state for start in sorted(row.parts) for state in row.parts[start]]
        assert len(states) == (row.admission.num_prompt if params.reads_all else 1), "states are missing"
        return np.array(pooled(states, params), dtype=np.float64)


class FakeExecutor(FakeRunner):
    """The whole protocol of an executor on the device of integers; an adapter is its number."""

    def __init__(self, config: EngineConfig, info: ModelInfo, capacity: Capacity, *, verify: bool = True) -> None:
        super().__init__(config, info, capacity, verify=verify)
        self.closed = False
        self.loss: EngineDeadError | None = None
        self._loras: dict[int, LoRARequest] = {}

    @classmethod
    def size(cls, hf_config: Any, info: ModelInfo, config: EngineConfig) -> ModelSize:
        """One number for each token."""
        return ModelSize(VOCAB, 8 * VOCAB)

    @classmethod
    def available_bytes(cls, config: EngineConfig) -> int:
        """As much as nobody needs."""
        return 1 << 40

    @classmethod
    def start(cls, hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> Self:
        """There is nothing to load."""
        return cls(config, info, fake_capacity(info, config))

    def check(self) -> None:
        """It is there until a test says otherwise."""
        if self.loss is not None:
            raise self.loss

    def watch(self, take: Watch | None) -> None:
        """There are no tensors."""

    def embeddings(self, digest: bytes) -> None:
        """There are no tensors."""

    def try_items(self, items: Sequence[MediaItem]) -> None:
        """There are no towers."""

    def read_lora(self, request: LoRARequest) -> None:
        """There is nothing to read."""

    def add_lora(self, request: LoRARequest) -> LoRARequest:
        """Its digest is made of its path."""
        digest = hashlib.sha256(request.lora_path.encode()).digest()
        return self._loras.setdefault(request.lora_int_id, dataclasses.replace(request, digest=digest))

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        return self._loras.pop(lora_int_id, None) is not None

    def pin_lora(self, lora_int_id: int) -> bool:
        """None is ever dropped."""
        return lora_int_id in self._loras

    def loras(self) -> tuple[LoRARequest, ...]:
        """See Executor."""
        return tuple(self._loras.values())

    def checksums(self) -> dict[str, str]:
        """There are no weights."""
        return {}

    def reset_weights(self) -> None:
        """There are no weights."""

    def check_sleeps(self) -> None:
        """It can."""

    def sleep(self, level: int) -> None:
        """The device forgets all that it has."""
        self.forget()

    def wake_up(self, parts: Collection[EnginePart]) -> None:
        """There is nothing to read."""

    def close(self) -> None:
        """Nothing to give back."""
        self.closed = True


def _value(row: FakeRow, position: int) -> int:
    found = row.embeds.get(position)
    return row.token_ids[position] if found is None else embed_value(*found)


def _embed_places(span: SpanView) -> dict[int, tuple[bytes, int]]:
    mask = span.embed_mask or (True,) * (span.stop - span.start)
    places = [span.start + offset for offset, takes in enumerate(mask) if takes]
    assert len(places) == span.num_embeds
    return {place: (span.digest, index) for index, place in enumerate(places)}


def prompt_columns(entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Reports of a prompt's positions as columns; all have as many candidates."""
    return PromptLogprobs(
        np.array([one.token_id for one in entries], np.int32),
        np.array([one.logprob for one in entries], np.float32),
        np.array([one.rank for one in entries], np.int32),
        np.array([one.top_ids for one in entries], np.int32).reshape(len(entries), -1 if entries else 0),
        np.array([one.top_logprobs for one in entries], np.float32).reshape(len(entries), -1 if entries else 0),
    )


def fake_logprobs(token: int) -> TokenLogprobs:
    """Log-probabilities that tell which token they belong to."""
    return TokenLogprobs(token, -1.0 - token, 1, (token,), (-1.0 - token,))


# ---- builders --------------------------------------------------------------------------------------------------------


def fake_info(*groups: KVGroup, **changes: Any) -> ModelInfo:
    """A model with these KV groups (one full group unless given)."""
    info = ModelInfo(
        path="",
        name="fake",
        architecture="Fake",
        model_type="fake",
        checkpoint_dtype="float32",
        vocab_size=VOCAB,
        num_ids=VOCAB,
        hidden_size=8,
        num_layers=3,
        max_model_len=4096,
        modalities=("image",),
        placeholder_ids={"image": PLACEHOLDER},
        position_axes=1,
        eos_ids=frozenset({2}),
        pad_id=0,
        kv_groups=groups or (FULL,),
    )
    return dataclasses.replace(info, **changes)


def fake_config(**changes: Any) -> EngineConfig:
    """Small limits: blocks of 4 positions, 8 rows, a budget of 32 positions."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=4,
        max_encoder_tokens=64,
        processor_cache_bytes=0,
        limit_per_prompt={},
    )
    return dataclasses.replace(config, **changes)


def fake_capacity(info: ModelInfo, config: EngineConfig, num_blocks: int | tuple[int, ...] = 512) -> Capacity:
    """That many blocks for each group, the null block included."""
    counts = (num_blocks,) * len(info.kv_groups) if isinstance(num_blocks, int) else num_blocks
    return Capacity(counts, 0, config.max_encoder_tokens)


def fake_item(
    name: str,
    num_tokens: int,
    mask: Iterable[bool] | None = None,
    features: Mapping[str, Any] | None = None,
    num_states: int = 0,
) -> MediaItem:
    """A picture of that name (equal names, equal pictures), which takes `num_tokens` places in the prompt.

    With `num_states` none of them takes an embedding.
    """
    embed_mask = None if mask is None else tuple(mask)
    if num_states:
        embed_mask = (False,) * num_tokens
    assert embed_mask is None or len(embed_mask) == num_tokens
    return MediaItem(
        modality="image",
        digest=hashlib.sha256(name.encode()).digest(),
        features=features or {},
        layout={},
        replacement_ids=(PLACEHOLDER,) * num_tokens,
        embed_mask=embed_mask,
        num_embeds=num_tokens if embed_mask is None else sum(embed_mask),
        num_states=num_states,
    )


def fake_request(request_id: str, *parts: int | Iterable[int] | MediaItem, **options: Any) -> Request:
    """A request whose prompt is the parts in order: a token, several tokens, or a picture.

    Fields of Sampling and of Request may be given by name; `params` in place of the former.
    """
    token_ids: list[int] = []
    spans: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, MediaItem):
            start = len(token_ids)
            token_ids.extend(part.replacement_ids)
            spans.append(MediaSpan(part, start, len(token_ids)))
        elif isinstance(part, int):
            token_ids.append(part)
        else:
            token_ids.extend(part)
    sampling = {f.name for f in dataclasses.fields(Sampling)}
    made = Sampling(**{name: value for name, value in options.items() if name in sampling})
    params = options.pop("params", made)
    rest = {name: value for name, value in options.items() if name not in sampling}
    return Request(id=request_id, token_ids=tuple(token_ids), params=params, spans=tuple(spans), **rest)
