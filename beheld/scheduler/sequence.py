"""The mutable life of one request inside the scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from beheld.core.media import MediaItem, MediaSpan
from beheld.core.plan import PromptLogprobs, SpanView
from beheld.core.pooling_params import Pooling
from beheld.core.repetition import RepetitionRuns
from beheld.core.request import Request
from beheld.core.sampling import Sampling


class Status(Enum):
    """Where a sequence stands; it may go back from RUNNING to WAITING (preemption), never back from FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class EmbedRange:
    """Where a span takes embeddings: from position `first` to before `last`, perhaps with gaps of text."""

    span: MediaSpan
    first: int
    last: int

    @property
    def item(self) -> MediaItem:
        """The item of this span."""
        return self.span.item

    def needed(self, start: int, stop: int) -> bool:
        """True if a position from `start` to before `stop` takes an embedding."""
        if stop <= self.first or start >= self.last:
            return False
        if self.item.embed_mask is None:
            return True
        return self.span.embeds_before(stop) > self.span.embeds_before(start)

    def next_embed(self, position: int) -> int:
        """The first position at or after `position` that takes an embedding; `position` is before `last`."""
        mask = self.item.embed_mask
        position = max(position, self.first)
        while mask is not None and not mask[position - self.span.start]:
            position += 1
        return position


def embed_range(span: MediaSpan) -> EmbedRange | None:
    """Where `span` takes embeddings; None if nowhere."""
    mask = span.item.embed_mask
    if span.item.num_embeds == 0:
        return None
    if mask is None:
        return EmbedRange(span, span.start, span.stop)
    first = mask.index(True)
    last = len(mask) - mask[::-1].index(True)
    return EmbedRange(span, span.start + first, span.start + last)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, from its arrival to its end.

    Attributes:
        request, params: what was asked.
        order: sort key; the smallest runs first and is preempted last.
        most_tokens: limit of prompt and answer together.
        most_positions: positions that can ever be computed: there are never more tokens, or never more blocks.
        token_ids: the prompt and the known output.
        num_prompt: how many of them are the prompt.
        rope_scale: "long" if its prompt is beyond the model's rope_switch, else "short"; keys depend on it.
        status: see Status.
        row: on the device; valid only while running.
        epoch: counts preemptions, so that a result of an earlier life is recognised.
        tables: for each KV group, the block ids (0 where nothing is kept); equally many, none if it has no blocks.
        kept: for each KV group, the first index whose block was not given back.
        num_slots: positions that the tables have room for.
        num_computed: positions that have been scheduled; valid only while running.
        num_in_flight: what steps in flight may give: tokens that the host does not know, or what a pool reads.
        settles: it is planned again only after its last result is known, as it has a grammar, pools, or speculates, or
            as other sequences are computed meanwhile.
        max_drafts: draft tokens that one of its slices may check.
        draft_ids: tokens that its runner expects after its newest one; in flight, those that are being checked.
        end: positions up to here can be scheduled: known tokens, those in flight, and drafts, within most_positions.
        block_keys: keys of its first blocks, as far as they were computed.
        key_span: index of the first span that may still overlap a block without a key.
        valid_epoch: results of earlier epochs are worth nothing: a step failed amid the states that they follow from.
        reported_epoch: the epoch that its last event reported.
        num_redone: steps of it in a row that failed so.
        num_keyed: blocks whose key has been given to the pools (or came from them).
        num_kept: blocks of its prompt that were given out to be kept outside of the engine, or need not be.
        embed_ranges: where its spans take embeddings, in order.
        next_range: index of the first of them that is not computed completely.
        held: the item whose range is computed in part, and whose embeddings must therefore stay on the device.
        state_items: its items that have states, each once.
        states: those of them that it holds: all while it runs (unless the device lost one), none while it waits.
        views: its spans as the device sees them.
        num_cached: prompt positions that came from the prefix cache, or from outside of the engine, when it was first
            admitted; None before that.
        num_external: those of them that came from outside.
        atomic: ranges of its positions that no slice may end within; see atomic_ranges.py.
        checkpoints: blocks of its prompt after which a recurrent state, or the inputs of a short convolution, are kept
            for others, see checkpoints.py; None if none are kept, of its answer neither.
        joint: the range whose keys and values depend on all of its positions; None if there is none.
        prompt_logprobs: those of the prompt's positions after `reports_from` as far as they arrived, in parts; None if
            not asked for.
        repetition: follows an answer that ends if it repeats itself; else None.
        silent: True until the first event.
        added_s: when it arrived, on the monotonic clock.
        waited_s: seconds from then to its first admission.
    """

    request: Request
    params: Sampling | Pooling
    order: tuple[int, float, int]
    most_tokens: int
    most_positions: int
    settles: bool
    max_drafts: int
    token_ids: list[int]
    num_prompt: int
    rope_scale: str
    tables: list[list[int]]
    kept: list[int]
    embed_ranges: tuple[EmbedRange, ...]
    views: tuple[SpanView, ...]
    state_items: tuple[MediaItem, ...]
    prompt_logprobs: list[PromptLogprobs] | None
    end: int
    atomic: tuple[tuple[int, int], ...] = ()
    joint: tuple[int, int] | None = None
    checkpoints: frozenset[int] | None = None
    status: Status = Status.WAITING
    row: int = 0
    epoch: int = 0
    reported_epoch: int = 0
    num_slots: int = 0
    num_computed: int = 0
    num_in_flight: int = 0
    draft_ids: tuple[int, ...] = ()
    block_keys: list[bytes] = field(default_factory=list)
    key_span: int = 0
    num_keyed: int = 0
    num_kept: int = 0
    next_range: int = 0
    held: MediaItem | None = None
    states: tuple[MediaItem, ...] = ()
    valid_epoch: int = 0
    num_redone: int = 0
    num_cached: int | None = None
    num_external: int = 0
    silent: bool = True
    added_s: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    repetition: RepetitionRuns | None = None

    @classmethod
    def born(
        cls,
        request: Request,
        order: tuple[int, float, int],
        num_groups: int,
        max_model_len: int,
        most_positions: int,
        rope_switch: int | None = None,
        num_draft_tokens: int = 0,
        *,
        settles: bool = False,
    ) -> Sequence:
        """A new sequence for a request that has just been added."""
        num_prompt = len(request.token_ids)
        far = rope_switch is not None and num_prompt > rope_switch
        params = request.params
        sampling = params if isinstance(params, Sampling) else None
        most_tokens = min(num_prompt + (0 if sampling is None else sampling.max_tokens), max_model_len)
        if rope_switch is not None and not far:
            # The token at that position is never computed.
            most_tokens = min(most_tokens, rope_switch + 1)
        # The last token of an answer is never computed, that of a prompt to be pooled is.
        most_positions = min(most_tokens if sampling is None else most_tokens - 1, most_positions)
        spans = request.spans
        # A logits processor would see tokens that are taken back.
        max_drafts = 0 if sampling is None or sampling.processors else num_draft_tokens
        return cls(
            request=request,
            params=params,
            order=order,
            most_tokens=most_tokens,
            most_positions=most_positions,
            settles=settles or sampling is None or sampling.grammar is not None or max_drafts > 0,
            max_drafts=max_drafts,
            token_ids=list(request.token_ids),
            num_prompt=num_prompt,
            repetition=None if sampling is None or sampling.repetition is None else RepetitionRuns(sampling.repetition),
            rope_scale="long" if far else "short",
            tables=[[] for _ in range(num_groups)],
            kept=[0] * num_groups,
            embed_ranges=tuple([found for found in map(embed_range, spans) if found is not None]) if spans else (),
            views=tuple(map(_view, spans)) if spans else (),
            state_items=tuple({s.item.digest: s.item for s in spans if s.item.num_states}.values()) if spans else (),
            prompt_logprobs=None if sampling is None or sampling.reports_from is None else [],
            end=num_prompt,
        )

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def prefills(self) -> bool:
        """True until only its newest token, and drafts after it, are left to be computed."""
        return self.num_computed < len(self.token_ids) - 1

    @property
    def reports_from(self) -> int:
        """The first position of the prompt, from 0, whose next token is reported on."""
        return (self.params.reports_from or 0) if isinstance(self.params, Sampling) else 0

    @property
    def num_reported(self) -> int:
        """Positions of the prompt, from 1 on, whose log-probabilities have arrived, or are not wanted."""
        return self.reports_from + sum(map(len, self.prompt_logprobs or ()))

    @property
    def may_hit(self) -> bool:
        """False while something of every position is wanted: logits and hidden states exist only where computed."""
        if isinstance(self.params, Pooling):
            return not self.params.reads_all
        return self.prompt_logprobs is None or self.num_reported >= self.num_prompt - 1

    def num_wanted(self, start: int, stop: int) -> int:
        """How many of the positions from `start` to before `stop` give something, see SeqSlice."""
        if isinstance(self.params, Pooling):
            if self.params.alignment is not None:
                return 0
            return stop - start if self.params.reads_all else int(stop == self.num_prompt)
        return max(0, stop + 1 - len(self.token_ids) - self.num_in_flight)

    def launched(self, stop: int, wanted: int) -> tuple[int, ...]:
        """Note that a slice up to `stop` is launched; returns the ids for its plan if it checks drafts."""
        self.num_in_flight += wanted
        if not self.settles:
            self.end = min(stop + 1, self.most_positions)
            return ()
        if isinstance(self.params, Pooling):
            return ()
        self.draft_ids = self.draft_ids[: wanted - 1]
        self.end = stop
        return (self.token_ids[-1], *self.draft_ids) if self.draft_ids else ()

    def settle(self, draft_ids: tuple[int, ...]) -> None:
        """All that was in flight has arrived; `draft_ids` are expected to follow."""
        self.end = min(len(self.token_ids) + min(len(draft_ids), self.max_drafts), self.most_positions)
        self.draft_ids = draft_ids[: max(0, self.end - len(self.token_ids))]

    def begin(self, start: int) -> None:
        """Positions before `start` need not be computed if the sequence is admitted now."""
        self.next_range = 0
        self.advance(start)

    def advance(self, stop: int) -> None:
        """Positions before `stop` have been scheduled."""
        self.num_computed = stop
        ranges, index = self.embed_ranges, self.next_range
        while index < len(ranges) and ranges[index].last <= stop:
            index += 1
        self.next_range = index

    def lose_result(self) -> None:
        """What a slice should have given will not arrive."""
        if self.settles:
            self.settle(())
        else:
            self.end = min(len(self.token_ids) + self.num_in_flight, self.most_positions)

    def rewind(self) -> None:
        """Forget what was computed: the blocks were given back, and the next admission fills the tables again."""
        assert not any(self.tables), "rewind a sequence that still holds blocks"
        self.epoch += 1
        self.begin(0)
        if self.draft_ids:
            self.settle(())


def _view(span: MediaSpan) -> SpanView:
    item = span.item
    return SpanView(
        modality=item.modality,
        digest=item.digest,
        start=span.start,
        stop=span.stop,
        embed_mask=item.embed_mask,
        num_embeds=item.num_embeds,
        layout=item.layout,
        num_states=item.num_states,
    )
