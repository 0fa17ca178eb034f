"""The step that is being planned, and the record of a plan in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from beheld.core.media import MediaItem
from beheld.core.plan import Admission, BlockKeep, BlockLoad, EncodeItem, SeqSlice, StepPlan
from beheld.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class StepBuilder:
    """What schedule() has decided so far.

    Attributes:
        budget: positions that may still be computed.
        most: the most sequences that it computes; beyond them it takes only further parts of prompts.
        limit: units of prefill that the step may still hold, see StepPace; None for no limit.
        weight: units of a position whose log-probabilities are reported; others have one.
        shares: for each client what is left of its share of prefill, in units; None while there is one client alone.
        shared: units that all shares have together.
        reserved: running sequence -> positions of its prompt that it may compute beyond its client's share, because
            others wait for the embeddings that it holds.
        deferred: clients that must compute more at once than their share, and the share of each.
        slices, sequences, epochs: parallel lists: each slice, its sequence, and that sequence's epoch.
        admitted, encode, load, keep: as in StepPlan.
        used: digests to release once the step is planned. The device drops embeddings before it computes, so none that
            this step uses may be dropped by it.
        encoder_closed: a sequence waits for room for embeddings, and no later one may take any.
        num_preempted: sequences that lost their blocks to others.
        num_plain, num_reported: prompt positions of the step without and with a report of log-probabilities.
        num_begun: sequences whose prompt ends in this step, so that it gives one more token than it computes positions.
        starved: a sequence must compute more at once than the limit allows, and nothing was prefilled before it.
    """

    budget: int
    most: int
    limit: int | None = None
    weight: int = 1
    shares: dict[str, int] | None = None
    shared: int = 0
    reserved: dict[Sequence, int] = field(default_factory=dict)
    deferred: dict[str, int] = field(default_factory=dict)
    slices: list[SeqSlice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    encode: list[EncodeItem] = field(default_factory=list)
    load: list[BlockLoad] = field(default_factory=list)
    keep: list[BlockKeep] = field(default_factory=list)
    used: list[bytes] = field(default_factory=list)
    encoder_closed: bool = False
    num_preempted: int = 0
    num_plain: int = 0
    num_reported: int = 0
    num_begun: int = 0
    starved: bool = False

    def add(self, sequence: Sequence, piece: SeqSlice) -> None:
        """Compute `piece`; the sequence knows already that its positions are scheduled."""
        self.slices.append(piece)
        self.sequences.append(sequence)
        self.epochs.append(sequence.epoch)
        self.budget -= piece.stop - piece.start

    @property
    def full(self) -> bool:
        """True if no sequence has a place that decodes or begins."""
        return self.budget <= 0 or len(self.slices) >= self.most

    def weight_of(self, sequence: Sequence) -> int:
        """Units that a position of its prompt costs."""
        return 1 if sequence.prompt_logprobs is None else self.weight

    def room(self, sequence: Sequence) -> int:
        """How many positions of a prompt may be computed."""
        weight = self.weight_of(sequence)
        room = self.budget if self.limit is None else min(self.budget, max(0, self.limit) // weight)
        if self.shares is None:
            return room
        own = self.reserved.get(sequence, 0)
        of_others = sum(self.reserved.values()) - own
        share = self.shares.get(sequence.request.client, 0) // weight
        return max(0, min(self.budget - of_others, room, share + own))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Positions of a prompt are computed: take them from what is reserved for it, then from its client's share."""
        weight = self.weight_of(sequence)
        if sequence.prompt_logprobs is None:
            self.num_plain += num_tokens
        else:
            self.num_reported += num_tokens
        if self.limit is not None:
            self.limit -= num_tokens * weight
        if self.shares is None:
            return
        own = min(num_tokens, self.reserved.get(sequence, 0))
        if own:
            self.reserved[sequence] -= own
        if num_tokens > own:
            self.shares[sequence.request.client] -= (num_tokens - own) * weight

    def too_small(self, sequence: Sequence) -> bool:
        """True if the share of its client does not suffice for a single position."""
        return self.shares is not None and 0 < self.shares.get(sequence.request.client, 0) < self.weight_of(sequence)

    def defer(self, sequence: Sequence) -> None:
        """The share of its client does not suffice: it is kept for a later step, and nobody uses it in this one."""
        client = sequence.request.client
        if self.limit is not None and not self.num_plain and not self.num_reported:
            self.starved = self.starved or self.shares is None or 0 < self.shared <= self.shares.get(client, 0)
        if self.shares:
            self.deferred.setdefault(client, self.shares.pop(client, 0))

    def encode_item(self, item: MediaItem) -> None:
        """Run the tower for `item`."""
        self.encode.append(EncodeItem(item.digest, item.modality, item.features, item.num_kept))


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A plan whose result is not known yet.

    Attributes:
        sequences, epochs: for each of its slices the sequence and its epoch.
        num_plain, num_reported: as in StepBuilder.
    """

    plan: StepPlan
    sequences: list[Sequence]
    epochs: list[int]
    num_plain: int = 0
    num_reported: int = 0


@dataclass(frozen=True)
class SchedulerStats:
    """What the scheduler holds now, and counters since it was created.

    Attributes:
        num_running, num_waiting: sequences.
        num_free_blocks: for each KV group, blocks that can be handed out (those with a cached prefix included).
        num_blocks: for each KV group, blocks in all, the null block not counted.
        num_cached_blocks: for each KV group, blocks whose content can be shared.
        num_preemptions: times a sequence lost its blocks to others.
        prefix_queries, prefix_hits: prompt tokens looked up at first admission, and those found.
        external_queries, external_hits: of those not found, what was looked up outside of the engine, and found there.
        num_embeds: embeddings on the device.
        max_embeds: most of them.
        num_encoded, num_reused: items encoded, and uses of an item that was on the device already.
        num_tokens: positions of prompts that all steps computed, and tokens that they gave.
        steps_by_tokens: how many steps had so many, by STEP_TOKENS, and those with more.
        running_loras, waiting_loras: names of the adapters of running and waiting sequences.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: tuple[int, ...]
    num_blocks: tuple[int, ...]
    num_cached_blocks: tuple[int, ...]
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_embeds: int
    max_embeds: int
    num_encoded: int
    num_reused: int
    num_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = ()
    running_loras: frozenset[str] = frozenset()
    waiting_loras: frozenset[str] = frozenset()
    external_queries: int = 0
    external_hits: int = 0
