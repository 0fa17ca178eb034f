"""The scheduler: plans each step in integers, and learns from its result.

There are no phases. A sequence has tokens (known ones, and those that the device has sampled but the host has not read)
and a number of positions that have been scheduled. A step lets that number catch up, for as many sequences and as far
as the token budget, the rows, the blocks and the room for embeddings allow. Prefill, a chunk of it, decoding and
continuing after a prefix hit are the same.

The device carries out plans in the order in which they were made. So a plan may be made before the result of the
previous one is known. What a sequence gives back (blocks, its row, embeddings) may be handed out in the next plan even
while a step that still writes there is in flight: that write is done before the new owner's.

Several clients share each step's prefill (fair_share.py), and a client without a running sequence comes before clients
that have one. Decoding never waits for that. With one client, plans are as they would be without these rules.

The prefill of a step is limited to what takes a bounded time (pace.py), and to less while other clients or decoding
sequences wait. An offline run has one client without a name, and is never limited.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING

from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, CapacityError, ParamsError, StepError
from beheld.core.outputs import TokenEvent
from beheld.core.plan import (
    MAX_DRAFT_TOKENS,
    STEP_TOKENS,
    Admission,
    PromptLogprobs,
    SeqSlice,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from beheld.core.pooling_params import Pooling
from beheld.core.request import FinishReason, Request
from beheld.core.sampling import Sampling
from beheld.scheduler.atomic_ranges import atomic_ranges, joint_range
from beheld.scheduler.cache.coordinator import CacheCoordinator
from beheld.scheduler.checkpoints import checkpoint_blocks, keeping
from beheld.scheduler.encoder_budget import EncoderBudget
from beheld.scheduler.encoder_refs import EncoderRefs
from beheld.scheduler.failed_steps import failure, stand_in
from beheld.scheduler.fair_share import FairShare
from beheld.scheduler.limits import refuse
from beheld.scheduler.loras import LoRAQuota
from beheld.scheduler.outside import OutsideBlocks, PrefixStore
from beheld.scheduler.pace import StepPace
from beheld.scheduler.queue import WaitingQueue
from beheld.scheduler.sequence import Sequence, Status
from beheld.scheduler.shared_prefill import SharedPrefills
from beheld.scheduler.step_builder import Flight, SchedulerStats, StepBuilder
from beheld.utils.tally import Tally

if TYPE_CHECKING:
    import numpy as np


# Turns of clients that fill a step.
_TURNS = 8
# Seconds that a step without anything to compute waits for blocks from outside.
_READ_S = 0.02
# How many times in a row a sequence is computed again after failed steps before it fails.
_MOST_REDONE = 2


class _Admitted(Enum):
    """Whether a waiting sequence was admitted; if not, why.

    POSTPONED: another sequence computes a prefix of it. SHARE: its share of the step is too small. ROOM: there is none.
    """

    YES = auto()
    POSTPONED = auto()
    SHARE = auto()
    ROOM = auto()


class Scheduler:
    """Decides what runs next. Its methods may be called in any order, but not from two threads at once.

    Args:
        store: where blocks of prompts are kept outside of the engine; only for models all of whose groups keep every
            position.
    """

    def __init__(
        self, config: EngineConfig, info: ModelInfo, capacity: Capacity, store: PrefixStore | None = None
    ) -> None:
        assert config.policy in ("fcfs", "priority"), config.policy
        assert 0 <= config.num_draft_tokens <= MAX_DRAFT_TOKENS, config.num_draft_tokens
        self._config = config
        self._info = info
        self._cache = CacheCoordinator(
            info.kv_groups, capacity.num_blocks, config.block_size, caching=config.prefix_caching
        )
        most = self._cache.most_positions()
        self._most_positions = config.max_model_len if most is None else min(most, config.max_model_len)
        self._keeps_edges = config.prefix_caching and keeping(info) is not None
        self._encoder = EncoderBudget(capacity.max_encoder_tokens)
        self._encoder_refs = EncoderRefs(self._encoder)
        self._queue = WaitingQueue()
        self._shared_prefills = SharedPrefills(config.block_size)
        self._outside = None if store is None else OutsideBlocks(store, config.block_size)
        self._loras = LoRAQuota(config.max_loras, 2 * config.max_num_seqs)
        # Client -> requests that have not ended.
        self._clients: Counter[str] = Counter()
        most_tokens = config.max_num_batched_tokens
        self._fair = FairShare(max(1, most_tokens // _TURNS), most_tokens)
        # Prompts that one step computes whole have no parts to be limited.
        self._pace = StepPace(config.max_step_s) if config.max_step_s is not None and config.chunked_prefill else None
        # What a sequence must compute at once exceeded the last step's limit: the next step has no limit.
        self._lifted = False
        # Clients for whose next sequence there was no room in the last step, those that wait longest first.
        self._short: dict[str, None] = {}
        # A running sequence waits for a block that a client with more sequences has.
        self._stalled = False
        # A sequence waited in the last step for embeddings that others hold.
        self._awaits_embeds = False
        # A sequence for which there was no room when its turn came, and how many have passed it since.
        self._blocked: Sequence | None = None
        self._num_passed = 0
        self._patience = 2 * config.max_num_seqs
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._flights: dict[int, Flight] = {}
        self._next_plan = 0
        self._next_order = 0
        self._num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._external_queries = 0
        self._external_hits = 0
        self._step_tokens = Tally(STEP_TOKENS)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ParamsError: a request with that id has not ended.
            PromptError, PromptTooLongError, CapacityError: it could never run; see limits.refuse.
        """
        if request.id in self._sequences:
            raise ParamsError(f"A request with the id {request.id!r} is still running.", param="request_id")
        refuse(request, self._config, self._info, self._cache, self._encoder.max_embeds)
        order = (0, 0.0, self._next_order)
        if self._config.policy == "priority":
            order = (request.priority, request.arrival, self._next_order)
        self._next_order += 1
        num_drafts = self._config.num_draft_tokens
        if num_drafts and not self._cache.can_truncate:
            num_drafts = 0
        sequence = Sequence.born(
            request,
            order,
            len(self._cache.groups),
            self._config.max_model_len,
            self._most_positions,
            self._info.rope_switch,
            num_drafts,
            settles=self._config.pipeline_parallel_size > 1,
        )
        sequence.atomic = atomic_ranges(request, self._info)
        sequence.joint = joint_range(request, self._info)
        if self._keeps_edges:
            sequence.checkpoints = checkpoint_blocks(request, self._info, self._config.block_size)
        self._sequences[request.id] = sequence
        self._clients[request.client] += 1
        self._queue.push(sequence)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request that its user cancelled; None if it is unknown."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, FinishReason.ABORT)

    def stop(self, request_id: str) -> None:
        """End a request whose text is complete, without an event."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)

    # ---- planning ----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next step; None if nothing can be computed now. May be called before the last plan's result is known.

        Running sequences come first, in their order; then waiting ones are admitted in theirs.
        """
        step = self._next_step()
        reads = False
        if not step.slices and not self._flights and self._outside is not None:
            reads = self._outside.wait(_READ_S)
            if reads:
                step = self._next_step()
        if not step.slices:
            assert self._flights or reads or not self._sequences, "sequences are left, and none can continue"
            return None
        plan = StepPlan(
            id=self._next_plan,
            slices=tuple(step.slices),
            admitted=tuple(step.admitted),
            encode=tuple(step.encode),
            released=tuple(self._released),
            forget=self._encoder.take_forgotten(),
            load=tuple(step.load),
            keep=tuple(step.keep),
        )
        self._step_tokens.add(self._config.max_num_batched_tokens - step.budget + step.num_begun)
        self._released.clear()
        self._next_plan += 1
        self._flights[plan.id] = Flight(plan, step.sequences, step.epochs, step.num_plain, step.num_reported)
        return plan

    def _next_step(self) -> StepBuilder:
        """What can be computed now; without a slice if that is nothing."""
        step = self._build_step()
        turns = 2 * _TURNS * len(self._clients) if len(self._clients) > 1 else 0
        while (step.num_preempted or turns or self._lifted) and not step.slices and not self._flights:
            # The last sequence was preempted for those before it, which this pass had looked at already; or no client
            # could use its share: the next ones are larger, or others'; or the limit was too small.
            turns = max(0, turns - 1)
            step = self._build_step()
        if not step.slices and not self._flights and len(self._clients) > 1:
            # No share can be used: the clients that have them wait for what sequences without a share hold.
            step = self._build_unshared_step()
        return step

    def _new_step(self) -> StepBuilder:
        """An empty step. Stages compute different steps at a time, so each step has its share of the sequences."""
        most, stages = self._config.max_num_seqs, self._config.pipeline_parallel_size
        if stages > 1:
            count = len(self._running) + min(len(self._queue), len(self._free_rows))
            most = max(1, -(-count // stages))
        return StepBuilder(self._config.max_num_batched_tokens, most)

    def _build_step(self) -> StepBuilder:
        step = self._new_step()
        pace = self._pace
        # An offline run waits for all of its answers; its one client has no name.
        if pace is not None and not self._lifted and self._clients.keys() != {""}:
            step.limit, step.weight = pace.units(alone=not self._others_wait()), pace.weight
        for sequence in self._shared_prefills.ready():
            self._queue.resume(sequence)
        if self._outside is not None:
            for sequence in self._outside.ready(self._cache.find_hit):
                self._queue.resume(sequence)
        if len(self._clients) > 1:
            if self._stalled:
                self._stalled = False
                self._take_from_most(step)
            entering = self._entering(step)
            if self._awaits_embeds:
                self._reserve(step)
            shares = self._share(step, entering)
            step.shares = shares.copy()
            self._serve_running(step)
            self._admit_in_turns(step, entering)
            for client, unused in reversed(step.deferred.items()):
                self._fair.defer(client, shares[client], unused)
        else:
            self._serve_running(step)
            self._admit_waiting(step)
        return self._closed(step)

    def _others_wait(self) -> bool:
        """True if a long step delays others than those whose prompts it computes."""
        return len(self._clients) > 1 or any(not sequence.prefills for sequence in self._running)

    def _build_unshared_step(self) -> StepBuilder:
        """Serve running sequences in their order, whatever the shares of their clients are."""
        step = self._new_step()
        self._serve_running(step)
        return self._closed(step)

    def _closed(self, step: StepBuilder) -> StepBuilder:
        """Note what the next step must know, and release what only this one uses."""
        self._awaits_embeds = step.encoder_closed
        self._lifted = step.starved
        for digest in step.used:
            self._encoder.release(digest)
        self._num_preemptions += step.num_preempted
        return step

    def _serve_running(self, step: StepBuilder) -> None:
        """One slice for each running sequence that has something to compute."""
        none = self._cache.no_blocks
        # Otherwise each has a place as long as there is budget.
        crowded = len(self._running) > step.most
        index = 0
        while index < len(self._running) and step.budget > 0:
            sequence = self._running[index]
            start, end = sequence.num_computed, sequence.end
            if start >= end or (crowded and step.full and not sequence.prefills):
                index += 1
            elif end - start == 1 and sequence.num_prompt <= start < sequence.num_slots:
                # Decoding into a block that the sequence has: by far the most frequent case, kept short.
                sequence.num_computed = end
                sequence.num_in_flight += 1
                if end < sequence.most_positions and not sequence.settles:
                    sequence.end = end + 1
                step.add(sequence, SeqSlice(sequence.row, start, end, none, 1))
                index += 1
            else:
                self._serve(sequence, step)
                # If it was preempted, the next one has its place.
                index += sequence.status is Status.RUNNING

    def _serve(self, sequence: Sequence, step: StepBuilder) -> None:
        """The general case of one running sequence: chunks, media, and preemption of others for their blocks."""
        start, prefills = sequence.num_computed, sequence.prefills
        most = min(sequence.end, start + (step.room(sequence) if prefills else step.budget))
        if most <= start:
            if step.too_small(sequence):
                step.defer(sequence)
            return
        fits = self._encoder_refs.limit(sequence, start, most, step)
        stop = self._cut(sequence, start, fits)
        if stop <= start:
            if fits == most < sequence.end:
                step.defer(sequence)
            return
        stop = self._find_blocks(sequence, stop, step)
        if stop > start:
            if prefills:
                step.charge(sequence, stop - start)
            self._compute(sequence, stop, step)

    def _find_blocks(self, sequence: Sequence, stop: int, step: StepBuilder) -> int:
        """How far blocks reach, up to `stop`; preempts the last running sequences until there is a block.

        Sequences after `sequence` are not in the step yet. It may preempt itself.
        """
        start = sequence.num_computed
        if stop <= sequence.num_slots:
            return stop
        self._cache.release(sequence)
        while True:
            fits = self._cut(sequence, start, self._cache.reach(sequence, stop))
            if fits > start:
                return fits
            if len(self._clients) == 1:
                victim = self._running[-1]
            else:
                victim = self._victim(sequence)
                if victim is sequence and self._victim().request.client != sequence.request.client:
                    # Those of the client that has more are in the step already: the next step begins with taking one.
                    self._stalled = True
                    return start
            assert victim is not sequence or len(self._running) > 1, "a sequence alone must fit, see limits"
            self._preempt(victim)
            step.num_preempted += 1
            if victim is sequence:
                return start

    def _victim(self, first: Sequence | None = None) -> Sequence:
        """Which running sequence is preempted, among `first` and those after it: of those with the worst priority, the
        last of the client that has the most."""
        level = self._running[-1].order[0]
        num_running = Counter(sequence.request.client for sequence in self._running)
        found, most = self._running[-1], 0
        for sequence in reversed(self._running):
            if sequence.order[0] < level or (first is not None and sequence.order < first.order):
                break
            if num_running[sequence.request.client] > most:
                found, most = sequence, num_running[sequence.request.client]
        return found

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a running sequence. It waits before all that arrived later, and is computed again.

        A token of it may be in flight. That token arrives as always, and the sequence is not admitted before.
        """
        self._leave_device(sequence)
        sequence.status = Status.WAITING
        sequence.rewind()
        self._queue.push(sequence)

    def _admit_waiting(self, step: StepBuilder) -> None:
        """Admit in the order of the queue; a sequence that cannot be admitted keeps all later ones waiting."""
        while not step.full and self._free_rows and self._cache.has_room:
            sequence = self._loras.peek(self._queue, next(iter(self._clients), ""))
            if sequence is None or sequence.num_in_flight > 0:
                return
            admitted = self._admit(sequence, step)
            if admitted is _Admitted.SHARE:
                step.defer(sequence)
            if admitted not in (_Admitted.YES, _Admitted.POSTPONED):
                return

    def _make_place(self, step: StepBuilder) -> list[str]:
        """Clients without a running sequence, for want of a row or room: meanwhile no others may admit one.

        The client of which most sequences run loses one to them. In the next step another, if that did not suffice.
        """
        full = not self._free_rows or not self._cache.has_room
        short = self._queue.clients if full else self._queue.clients & self._short.keys()
        if not short or not self._running:
            return []
        level = self._running[-1].order[0]
        running = {sequence.request.client for sequence in self._running}
        first = [client for client in short if client not in running and self._is_ready(client, level)]
        if first:
            self._take_from_most(step)
        return first

    def _take_from_most(self, step: StepBuilder) -> None:
        """Preempt the last sequence of the client of which most run, unless it is its only one."""
        victim = self._victim()
        if sum(sequence.request.client == victim.request.client for sequence in self._running) > 1:
            self._preempt(victim)
            step.num_preempted += 1

    def _is_ready(self, client: str, level: int) -> bool:
        """True if a waiting sequence of a client lacks only a place, and has that priority or a better one."""
        sequence = self._loras.peek(self._queue, client)
        return sequence is not None and sequence.num_in_flight == 0 and sequence.order[0] <= level

    def _entering(self, step: StepBuilder) -> list[str]:
        """Clients whose waiting sequences may be admitted; those that waited for an adapter's slot come first.

        If there is no room for a sequence, those of other clients may pass it, but not for ever.
        """
        short = [client for client in self._short if client in self._queue.clients]
        clients = list(dict.fromkeys([*self._queue.clients_aside, *short, *self._queue.clients]))
        self._loras.recall(self._queue)
        blocked = self._blocked
        if blocked is not None and blocked.status is not Status.WAITING:
            self._blocked = blocked = None
        first = self._make_place(step)
        if first:
            return first
        if blocked is not None and self._num_passed >= self._patience:
            level = blocked.order[0]
            heads = map(self._queue.peek, clients)
            if all(head is None or head.order[0] >= level for head in heads):
                return [blocked.request.client]
        return clients

    def _reserve(self, step: StepBuilder) -> None:
        """Let running sequences use up the embeddings that others wait for, whatever the shares of their clients.

        Otherwise a client of better priority could get all shares while its sequences wait for these embeddings.
        """
        budget = step.budget
        for sequence in self._running:
            if budget <= 0:
                break
            if sequence.held is not None and sequence.prefills:
                last = min(sequence.end, sequence.embed_ranges[sequence.next_range].last)
                step.reserved[sequence] = min(budget, last - sequence.num_computed)
                budget -= step.reserved[sequence]

    def _share(self, step: StepBuilder, entering: list[str]) -> dict[str, int]:
        """What each client may prefill in this step, after what is decoded and what is reserved; in units."""
        reserved = sum(step.reserved.values())
        budget = step.budget - reserved
        wanted: dict[str, int] = {}
        levels: dict[str, int] = {}
        for sequence in self._running:
            left = sequence.end - sequence.num_computed - step.reserved.get(sequence, 0)
            if left <= 0:
                continue
            if not sequence.prefills:
                budget -= left
                continue
            client = sequence.request.client
            wanted[client] = wanted.get(client, 0) + left * step.weight_of(sequence)
            # They are in the order of their priorities.
            levels.setdefault(client, sequence.order[0])
        if self._free_rows and self._cache.has_room:
            for client in entering:
                head = self._queue.peek(client)
                if head is not None:
                    units = self._queue.num_tokens(client) * step.weight_of(head)
                    wanted[client] = wanted.get(client, 0) + units
                    levels[client] = min(levels.get(client, head.order[0]), head.order[0])
        if step.limit is None:
            return self._fair.share(budget, wanted, levels)
        units = sum(number * step.weight_of(sequence) for sequence, number in step.reserved.items())
        step.shared = min(budget, max(0, step.limit - units))
        return self._fair.share(step.shared, wanted, levels, step.limit // _TURNS)

    def _admit_in_turns(self, step: StepBuilder, entering: list[str]) -> None:
        """Admit sequences of these clients, of each as far as its share goes."""
        shares = step.shares
        assert shares is not None
        self._short.clear()
        for client in entering:
            if not self._free_rows or not self._cache.has_room:
                # It comes first in the next step.
                self._short[client] = None
                continue
            while shares.get(client, 0) > 0 and not step.full and self._free_rows and self._cache.has_room:
                sequence = self._loras.peek(self._queue, client)
                if sequence is None or sequence.num_in_flight > 0:
                    break
                admitted = self._admit(sequence, step)
                if admitted is _Admitted.YES:
                    self._num_passed += 1
                    continue
                if admitted is _Admitted.POSTPONED:
                    continue
                if admitted is _Admitted.SHARE:
                    step.defer(sequence)
                else:
                    self._short[client] = None
                    if self._blocked is None:
                        self._blocked, self._num_passed = sequence, 0
                break

    def _admit(self, sequence: Sequence, step: StepBuilder) -> _Admitted:
        """Give the first sequence of its client a row and its first slice, or neither."""
        outside = self._outside
        if outside is not None and outside.crowded(sequence):
            return _Admitted.ROOM
        num_hit = self._cache.find_hit(sequence)
        if self._config.prefix_caching and self._shared_prefills.waits(sequence, num_hit):
            self._queue.postpone(sequence.request.client)
            return _Admitted.POSTPONED
        num_given = num_hit
        if outside is not None:
            if outside.waits(sequence, num_hit):
                self._queue.postpone(sequence.request.client)
                return _Admitted.POSTPONED
            num_given = self._cache.whole(sequence, outside.reach(sequence, num_hit))
        start = num_given * self._config.block_size
        sequence.begin(start)
        most = min(sequence.end, start + step.room(sequence))
        fits = min(
            self._encoder_refs.limit(sequence, start, most, step) if sequence.embed_ranges else most,
            self._cache.reach_of_hit(sequence, num_hit),
        )
        stop = self._cut(sequence, start, fits)
        whole = self._config.chunked_prefill or len(sequence.token_ids) > sequence.num_prompt
        if stop <= start or (stop < sequence.end and not whole):
            return _Admitted.SHARE if fits == most < sequence.end else _Admitted.ROOM
        if sequence.state_items and not self._encoder_refs.can_admit(sequence, step):
            return _Admitted.ROOM
        self._queue.pop(sequence.request.client)
        step.charge(sequence, stop - start)
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        if self._running and sequence.order < self._running[-1].order:
            insort(self._running, sequence, key=_order)
        else:
            self._running.append(sequence)
        if sequence.state_items:
            self._encoder_refs.admit(sequence, step)
        self._loras.enter(sequence, self._queue)
        if sequence.num_cached is None:
            sequence.num_cached = start
            sequence.waited_s = time.monotonic() - sequence.added_s
            self._prefix_queries += sequence.num_prompt
            self._prefix_hits += num_hit * self._config.block_size
            if outside is not None:
                sequence.num_external = start - num_hit * self._config.block_size
                self._external_queries += sequence.num_prompt - num_hit * self._config.block_size
                self._external_hits += sequence.num_external
        blocks = self._cache.take_hit(sequence, num_hit)
        if outside is not None:
            added = self._cache.extend(sequence, start)
            blocks = tuple([own + new for own, new in zip(blocks, added, strict=True)])
            load = outside.take(sequence, num_hit, added)
            if load is not None:
                step.load.append(load)
        step.admitted.append(
            Admission(
                row=sequence.row,
                # Nothing was generated at its first admission.
                token_ids=sequence.request.token_ids
                if len(sequence.token_ids) == sequence.num_prompt
                else tuple(sequence.token_ids),
                num_prompt=sequence.num_prompt,
                spans=sequence.views,
                params=sequence.params,
                lora=sequence.request.lora,
                num_computed=start,
                blocks=blocks,
            )
        )
        if self._config.prefix_caching:
            self._shared_prefills.announce(sequence)
        self._compute(sequence, stop, step)
        return _Admitted.YES

    def _compute(self, sequence: Sequence, stop: int, step: StepBuilder) -> None:
        """Add the slice up to `stop`; the caller has checked that there is room for all it needs."""
        start = sequence.num_computed
        if sequence.next_range < len(sequence.embed_ranges):
            self._encoder_refs.hold(sequence, start, stop, step)
        wanted = sequence.num_wanted(start, stop)
        if wanted and start < sequence.num_prompt and isinstance(sequence.params, Sampling):
            step.num_begun += 1
        new_blocks = self._cache.extend(sequence, stop)
        if self._outside is not None and start < sequence.num_prompt:
            keep = self._outside.keep(sequence, start, stop)
            if keep is not None:
                step.keep.append(keep)
        sequence.advance(stop)
        token_ids = sequence.launched(stop, wanted) if wanted else ()
        step.add(sequence, SeqSlice(sequence.row, start, stop, new_blocks, wanted, token_ids))

    def _cut(self, sequence: Sequence, start: int, stop: int) -> int:
        """Shorten a slice that would end inside a range that this model computes in one step."""
        if stop < sequence.num_prompt:
            for low, high in sequence.atomic:
                if low < stop < high:
                    return max(start, low)
        return stop

    # ---- results -----------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, seconds: float | None = None) -> list[TokenEvent]:
        """Take in the result of `plan`: append tokens, end sequences, and let others share full blocks from now on.

        Args:
            seconds: how long the device computed it; None if that says nothing about later steps.
        """
        assert result.plan_id == plan.id, "a result of another plan"
        flight = self._flights.pop(plan.id)
        if seconds is not None and self._pace is not None:
            self._pace.observe(flight.num_plain, flight.num_reported, seconds)
        for old in [number for number in self._flights if number < plan.id]:
            abandoned = self._flights.pop(old)
            assert all(s.status is Status.FINISHED for s in abandoned.sequences), "a result was skipped"
        self.lose(result.lost)
        events: list[TokenEvent] = []
        size = self._config.block_size
        tokens, logprobs, failed, redone = result.tokens, result.logprobs, result.failed, result.redone
        if self._outside is not None:
            self._outside.take_in(flight.sequences, plan, result)
            failed = {**self._outside.failures(flight.sequences, plan), **failed}
        for piece, sequence, epoch in zip(plan.slices, flight.sequences, flight.epochs, strict=True):
            row, stop, wanted = piece.row, piece.stop, piece.wanted
            sequence.num_in_flight -= wanted
            if sequence.status is Status.FINISHED:
                continue
            if (redone and row in redone) or epoch < sequence.valid_epoch:
                sequence.lose_result()
                if epoch >= sequence.valid_epoch:
                    self._redo(sequence, epoch, redone[row], events)
                continue
            sequence.num_redone = 0
            given = tokens.get(row, ()) if wanted else ()
            if sequence.prompt_logprobs is not None:
                _collect_prompt(sequence, piece, result.prompt_logprobs.get(row))
            if given:
                sequence.token_ids += given
                # Positions after the last correct draft were computed for nothing.
                stop -= wanted - len(given)
                if sequence.settles:
                    self._settle(sequence, stop, result.draft_ids.get(row, ()) if sequence.epoch == epoch else ())
            if failed and row in failed:
                self._fail_step(
                    sequence,
                    given,
                    logprobs.get(row, ()),
                    failure(failed[row], culprit=row in result.culprits),
                    events,
                )
                continue
            if stop >= (sequence.num_keyed + 1) * size and sequence.epoch == epoch:
                self._cache.register(sequence, stop)
            if given:
                self._grown(sequence, given, logprobs.get(row, ()), events)
            elif row in result.pooled:
                events.append(self._pooled(sequence, result.pooled[row]))
        return events

    def _redo(self, sequence: Sequence, epoch: int, reason: str, events: list[TokenEvent]) -> None:
        """A step failed amid the recurrent states of a sequence: it is computed again from its start, but not for ever.

        What steps in flight make of these states is not looked at.
        """
        sequence.num_redone += 1
        if sequence.num_redone > _MOST_REDONE:
            events.append(self._end(sequence, FinishReason.ERROR, StepError(reason)))
            return
        sequence.valid_epoch = epoch + 1
        if sequence.epoch == epoch:
            self._preempt(sequence)
            self._num_preemptions += 1

    def stand_ins(self, plan: StepPlan, rows: Collection[int]) -> tuple[Admission, ...]:
        """Admissions that put harmless sequences of the same lengths, in the same blocks, in the place of these rows.

        The plan can then be run in its shape without what made it fail. Only for rows whose sequences fail with it:
        their tokens, keys and values are no longer theirs.
        """
        admitted = {admission.row: admission for admission in plan.admitted}
        flight = self._flights[plan.id]
        return tuple(
            stand_in(sequence, piece, admitted.get(piece.row))
            for piece, sequence in zip(flight.plan.slices, flight.sequences, strict=True)
            if piece.row in rows
        )

    def alone(self, plan: StepPlan) -> frozenset[int]:
        """The rows of a plan in flight whose slices can be run again, although later plans are in flight, too.

        Their sequences still have them, and no later plan continues these or drops embeddings.
        """
        flight = self._flights[plan.id]
        later = [other for number, other in self._flights.items() if number > plan.id]
        if any(other.plan.forget for other in later):
            return frozenset()
        continued = {sequence for other in later for sequence in other.sequences}
        return frozenset(
            piece.row
            for piece, sequence, epoch in zip(flight.plan.slices, flight.sequences, flight.epochs, strict=True)
            if sequence.status is Status.RUNNING and sequence.epoch == epoch and sequence not in continued
        )

    def awaits(self, plan: StepPlan) -> bool:
        """True if the result of `plan` has not been taken in."""
        return plan.id in self._flights

    def lose(self, digests: Iterable[bytes]) -> None:
        """Note that these items are not on the device, although they should be."""
        for digest in digests:
            self._encoder_refs.lose(digest, self._running)

    def abandon(self, known: Iterable[StepPlan]) -> list[StepPlan]:
        """Give up all plans except `known` whose results were not taken in, end their sequences, and return the plans.

        The device may have carried them out in part. So the next plan repeats what they should have released and
        forgotten, and the caller asks the device which items they should have encoded are missing, and calls `lose`.
        """
        plans = []
        kept = {plan.id for plan in known}
        for number in [number for number in self._flights if number not in kept]:
            flight = self._flights.pop(number)
            plans.append(flight.plan)
            for sequence in flight.sequences:
                if sequence.status is not Status.FINISHED:
                    self._finish(sequence)
            self._released += [row for row in flight.plan.released if row not in self._released]
            encoded = {item.digest for item in flight.plan.encode}
            self._encoder.forget_again(digest for digest in flight.plan.forget if digest not in encoded)
        return plans

    def lose_device(self) -> None:
        """The device is another one: running sequences are computed again from their start, and nothing is cached.

        No step may be in flight.
        """
        assert not self._flights, "a step is in flight"
        while self._running:
            self._preempt(self._running[-1])
        self.clear_prefix_cache()
        self.lose(self._encoder.known)
        self._encoder.take_forgotten()
        self._released.clear()

    def _settle(self, sequence: Sequence, stop: int, draft_ids: tuple[int, ...]) -> None:
        """Take back positions from `stop` on, which were computed with wrong drafts, and note the next drafts."""
        if sequence.status is Status.RUNNING and sequence.num_computed > stop:
            sequence.num_computed = stop
            self._cache.truncate(sequence)
        sequence.settle(draft_ids)

    def _grown(
        self,
        sequence: Sequence,
        given: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        events: list[TokenEvent],
    ) -> None:
        """Announce the tokens that were just appended, and end the sequence at the first that ends it."""
        params = sequence.params
        assert isinstance(params, Sampling)
        length = before = len(sequence.token_ids) - len(given)
        finish: FinishReason | None = None
        stop_id: int | None = None
        for token in given:
            length += 1
            if token in params.stop_ids and length - sequence.num_prompt >= params.min_tokens:
                finish = FinishReason.STOP
                stop_id = token if token in params.own_stop_ids else None
                break
            repeats = sequence.repetition is not None and sequence.repetition.push(token)
            if length >= sequence.most_tokens:
                finish = FinishReason.LENGTH
                break
            if repeats and length - sequence.num_prompt >= params.min_tokens:
                finish = FinishReason.REPETITION
                break
        if finish is not None:
            given, logprobs = given[: length - before], logprobs[: length - before]
        events.append(self._event(sequence, given, finish, stop_id, logprobs))
        if finish is not None:
            self._finish(sequence)
        elif length > sequence.most_positions:
            error = CapacityError(
                f"The answer was cut: the KV cache holds {sequence.most_positions} tokens of one request.",
                "Ask for fewer tokens.",
                param="max_tokens",
                or_engine="give the cache more memory",
            )
            events.append(self._end(sequence, FinishReason.ERROR, error))

    def _pooled(self, sequence: Sequence, pooled: np.ndarray) -> TokenEvent:
        """The vector of a prompt, which is all that its request wants."""
        event = self._event(sequence, (), FinishReason.STOP, pooled=pooled)
        self._finish(sequence)
        return event

    def _fail_step(
        self,
        sequence: Sequence,
        given: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        error: BeheldError,
        events: list[TokenEvent],
    ) -> None:
        """End a sequence whose step failed, unless a token before the failure ends it; none of its blocks is shared."""
        self._cache.drop_keys(sequence)
        if self._outside is not None:
            self._outside.drop(sequence)
        if given:
            self._grown(sequence, given, logprobs, events)
        if sequence.status is not Status.FINISHED:
            events.append(self._end(sequence, FinishReason.ERROR, error))

    def _event(
        self,
        sequence: Sequence,
        given: tuple[int, ...],
        finish: FinishReason | None,
        stop_id: int | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: BeheldError | None = None,
        pooled: np.ndarray | None = None,
    ) -> TokenEvent:
        prompt, cached, waited, external = None, 0, 0.0, 0
        if sequence.silent:
            sequence.silent = False
            if given and sequence.prompt_logprobs is not None:
                prompt = PromptLogprobs.joined(sequence.prompt_logprobs)
            cached, waited, external = sequence.num_cached or 0, sequence.waited_s, sequence.num_external
        name, times = sequence.request.id, 0
        if sequence.reported_epoch != sequence.epoch:
            times = sequence.reported_epoch = sequence.epoch
        return TokenEvent(
            *(name, given, finish, stop_id, logprobs, prompt, cached, error, waited, pooled, False, times, external)
        )

    def _end(self, sequence: Sequence, finish: FinishReason, error: BeheldError | None = None) -> TokenEvent:
        self._finish(sequence)
        return self._event(sequence, (), finish, error=error)

    def _finish(self, sequence: Sequence) -> None:
        """Give back all that a sequence has. Its results that are still in flight will be ignored."""
        if sequence.status is Status.RUNNING:
            self._leave_device(sequence)
            sequence.status = Status.FINISHED
        else:
            sequence.status = Status.FINISHED
            self._queue.discard(sequence)
        if self._outside is not None:
            self._outside.forget(sequence)
        del self._sequences[sequence.request.id]
        client = sequence.request.client
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    def _leave_device(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._loras.leave(sequence)
        self._shared_prefills.forget(sequence)
        self._cache.free(sequence)
        self._free_rows.append(sequence.row)
        self._released.append(sequence.row)
        self._encoder_refs.leave(sequence)

    # ---- looking -----------------------------------------------------------------------------------------------------

    def request_ids(self, plan: StepPlan) -> dict[int, str]:
        """Row -> request id, for the slices of a plan whose result has not been taken in yet."""
        flight = self._flights[plan.id]
        return {piece.row: s.request.id for piece, s in zip(plan.slices, flight.sequences, strict=True)}

    def all_request_ids(self) -> list[str]:
        """The ids of all requests that wait or run."""
        return list(self._sequences)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        self._cache.clear()
        if self._outside is not None:
            self._outside.void()

    def clear_embeddings(self) -> None:
        """Drop the embeddings and states of all items; sequences that hold some are computed again from their start.

        No step may be in flight.
        """
        assert not self._flights, "a step is in flight"
        for sequence in reversed(list(self._running)):
            if sequence.held is not None or sequence.states:
                self._preempt(sequence)
        self._encoder.drop_idle()

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row or for blocks."""
        return len(self._queue)

    def num_unseen(self, request_id: str) -> int:
        """Tokens of a waiting request that no cached prefix covers now."""
        sequence = self._sequences[request_id]
        return len(sequence.token_ids) - self._cache.find_hit(sequence) * self._config.block_size

    def stats(self) -> SchedulerStats:
        """A snapshot of counts."""
        groups = self._cache.groups
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_free_blocks=tuple(group.num_free for group in groups),
            num_blocks=tuple(group.num_blocks for group in groups),
            num_cached_blocks=tuple(group.num_cached for group in groups),
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_embeds=self._encoder.num_used,
            max_embeds=self._encoder.max_embeds,
            num_encoded=self._encoder.num_encoded,
            num_reused=self._encoder.num_reused,
            num_tokens=int(self._step_tokens.total),
            steps_by_tokens=tuple(self._step_tokens.counts),
            running_loras=self._lora_names(Status.RUNNING),
            waiting_loras=self._lora_names(Status.WAITING),
            external_queries=self._external_queries,
            external_hits=self._external_hits,
        )

    def _lora_names(self, status: Status) -> frozenset[str]:
        """The names of the adapters of all sequences with this status."""
        if not self._config.max_loras:
            return frozenset()
        loras = [s.request.lora for s in self._sequences.values() if s.status is status]
        return frozenset(lora.lora_name for lora in loras if lora is not None)

    def check(self) -> None:
        """Assert every invariant of rows, queue, blocks and embeddings."""
        rows = [sequence.row for sequence in self._running] + self._free_rows
        assert sorted(rows) == list(range(self._config.max_num_seqs)), "rows were lost or given twice"
        assert len(self._running) + len(self._queue) == len(self._sequences), "a sequence was lost"
        assert self._clients == Counter(s.request.client for s in self._sequences.values()), (
            "the clients are miscounted"
        )
        orders = [sequence.order for sequence in self._running]
        assert orders == sorted(orders), "running sequences are out of order"
        for sequence in self._sequences.values():
            pools = isinstance(sequence.params, Pooling)
            known = len(sequence.token_ids) + (0 if pools else sequence.num_in_flight)
            ready = len(sequence.token_ids) + len(sequence.draft_ids) if sequence.settles else known
            assert sequence.end == min(ready, sequence.most_positions), "a sequence miscounts what it may compute"
            assert 0 <= sequence.num_computed <= sequence.end
            assert known <= sequence.most_tokens
            assert len(sequence.draft_ids) <= sequence.max_drafts
            if sequence.status is Status.WAITING:
                assert sequence.held is None, "a waiting sequence holds embeddings"
                assert not sequence.states, "a waiting sequence holds states"
                assert not any(sequence.tables), "a waiting sequence holds blocks"
        self._queue.check()
        if self._outside is not None:
            self._outside.check([s for s in self._sequences.values() if s.status is Status.WAITING])
        self._loras.check(self._running)
        self._shared_prefills.check(self._running)
        self._cache.check(self._running)
        self._encoder_refs.check(self._running)


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


def _collect_prompt(sequence: Sequence, piece: SeqSlice, report: PromptLogprobs | None) -> None:
    """Append those of positions start + 1, start + 2, ... that have not arrived before a preemption."""
    have = sequence.prompt_logprobs
    if have is not None and report is not None and len(report):
        count = sequence.num_reported
        begin = max(piece.start, sequence.reports_from)
        assert begin <= count, "log-probabilities of the prompt are missing"
        have.append(report.since(count - begin))
