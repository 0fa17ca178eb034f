"""The step that is being planned, and the record of a plan in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from beheld.core.media import MediaItem
from beheld.core.plan import Admission, EncodeItem, SeqSlice, StepPlan
from beheld.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class StepBuilder:
    """What schedule() has decided so far.

    Attributes:
        budget: positions that may still be computed.
        most: it computes so many sequences, and beyond them only further parts of prompts.
        shares: for each client what is left of its share of prefill; None while there is one client alone.
        reserved: running sequence -> positions of its prompt that it may compute beyond its client's share, because
            others wait for the embeddings that it holds.
        deferred: clients that must compute more at once than their share, and the share of each.
        slices, sequences, epochs: parallel lists: each slice, its sequence, and that sequence's epoch.
        admitted, encode: as in StepPlan.
        used: digests to release once the step is planned. The device drops embeddings before it computes, so none that
            this step uses may be dropped by it.
        encoder_closed: a sequence waits for room for embeddings, and no later one may take any.
        num_preempted: sequences that lost their blocks to others.
    """

    budget: int
    most: int
    shares: dict[str, int] | None = None
    reserved: dict[Sequence, int] = field(default_factory=dict)
    deferred: dict[str, int] = field(default_factory=dict)
    slices: list[SeqSlice] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    encode: list[EncodeItem] = field(default_factory=list)
    used: list[bytes] = field(default_factory=list)
    encoder_closed: bool = False
    num_preempted: int = 0

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

    def room(self, sequence: Sequence) -> int:
        """How many positions of a prompt may be computed."""
        if self.shares is None:
            return self.budget
        own = self.reserved.get(sequence, 0)
        of_others = sum(self.reserved.values()) - own
        return max(0, min(self.budget - of_others, self.shares.get(sequence.request.client, 0) + own))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Positions of a prompt are computed: take them from what is reserved for it, then from its client's share."""
        if self.shares is None:
            return
        own = min(num_tokens, self.reserved.get(sequence, 0))
        if own:
            self.reserved[sequence] -= own
        if num_tokens > own:
            self.shares[sequence.request.client] -= num_tokens - own

    def defer(self, sequence: Sequence) -> None:
        """The share of its client does not suffice: it is kept for a later step, and nobody uses it in this one."""
        if self.shares:
            client = sequence.request.client
            self.deferred.setdefault(client, self.shares.pop(client, 0))

    def encode_item(self, item: MediaItem) -> None:
        """Run the tower for `item`."""
        self.encode.append(EncodeItem(item.digest, item.modality, item.features, item.num_kept))


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A plan whose result is not known yet, and for each of its slices the sequence and its epoch."""

    plan: StepPlan
    sequences: list[Sequence]
    epochs: list[int]


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
        num_embeds: embeddings on the device.
        max_embeds: most of them.
        num_encoded, num_reused: items encoded, and uses of an item that was on the device already.
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
