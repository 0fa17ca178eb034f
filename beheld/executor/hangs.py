"""Finds the rank that hangs: others wait for it, or it has been in one step for too long, or the devices stand still.

A long prompt and a compiler are no hang. So ranks that do equal work are compared, and hosts that compute count the
layers that they begin; limits grow with the number of positions under way, by many times what the slowest device takes
for one. BEHELD_HANG_FACTOR multiplies all limits, for machines that something slows down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from beheld.executor.progress import RankProgress

# How long a rank may wait in a collective that another one has not reached. Ranks do equal work between collectives, so
# they reach them at nearly the same time, unless they compile for new sizes. The first rank also runs code of
# users, such as logits processors.
STUCK_S, COMPILING_S = 7.0, 90.0
# How long the first rank may wait for its device when no rank's host has anything left to launch.
DEVICE_S = 7.0
# How long a host may compile in one step, or run code of users, whether another rank waits for it or not.
WORKING_S = 600.0
# Seconds added for each position and embedding in flight: where a GPU computes, and where the host's cores do.
POSITION_S, HOST_POSITION_S = 0.01, 1.0
# Seconds added for each position while the host's cores compute one layer: for the smallest layer, for each unit of the
# squared hidden size, and at most; and for each unit of the hidden size and each position that it attends to. With a
# hidden size of 3,584, a layer's weights are 0.4 billion products and sums, and attention to 100,000 positions 0.7
# billion; slow cores do 10 billion in a second.
LAYER_POSITION_S, SQUARE_S, MOST_LAYER_POSITION_S, ATTENDED_S = 0.02, 1.5e-8, 0.2, 4e-10
# No device is more steps behind its host, which writes their inputs into few buffers in turn.
_UNDER_WAY = 16


@dataclass(frozen=True)
class Patience:
    """How long ranks are waited for.

    Attributes:
        stuck_s: for one that has not reached a collective.
        position_s: further, for each position under way.
        alike: ranks do equal work on the host's cores, so nothing is added to `stuck_s`.
        factor: by which every limit is multiplied.
        layer_position_s: for each position under way, for a host that computes a layer; None if a device of its own
            computes them.
        attended_s: for each position that one under way attends to, for such a host.
    """

    stuck_s: float
    position_s: float
    alike: bool
    factor: float = 1.0
    layer_position_s: float | None = None
    attended_s: float = 0.0

    @classmethod
    def of(cls, *, synchronous: bool, lockstep: bool, equal: bool = True, factor: float = 1.0) -> Patience:
        """Return that of ranks on such devices.

        A stage computes all of its layers without a sign of life. On a device of its own, ranks also compile, and one
        may take longer for that than another.

        Args:
            synchronous: whether hosts compute, and not devices of their own.
            lockstep: whether all ranks begin the same collectives in the same order.
            equal: whether they do equal work between them; not if each has experts or items of its own.
            factor: how many times as long as on a machine that nothing slows down.
        """
        alike = synchronous and lockstep and equal
        stuck_s, position_s = STUCK_S if alike else COMPILING_S, HOST_POSITION_S if synchronous else POSITION_S
        return cls(factor * stuck_s, factor * position_s, alike, factor, factor * position_s if synchronous else None)

    def of_layers(self, hidden_size: int) -> Patience:
        """Return that of ranks that count layers of this size."""
        if self.layer_position_s is None:
            return self
        layer_s = min(MOST_LAYER_POSITION_S, LAYER_POSITION_S + SQUARE_S * hidden_size**2)
        attended_s = self.factor * ATTENDED_S * hidden_size
        return replace(self, layer_position_s=self.factor * layer_s, attended_s=attended_s)


@dataclass(frozen=True)
class StepSize:
    """What a step computes.

    Attributes:
        positions: of texts.
        embeddings: of items.
        attended: how many positions each position attends to, added up.
    """

    positions: int
    embeddings: int = 0
    attended: int = 0


class Hangs:
    """Looks at what ranks say of themselves.

    Args:
        own: of the first rank.
        lockstep: whether all ranks begin the same collectives in the same order.
    """

    def __init__(
        self, own: RankProgress, others: Sequence[RankProgress], patience: Patience, *, lockstep: bool
    ) -> None:
        self._own, self._others, self._patience, self._lockstep = own, others, patience, lockstep
        # Since when the first rank has been in steps without a pause, as far as it was looked at.
        self._busy_since: float | None = None
        # Steps that may not have been computed yet, by the ids of their plans.
        self._sizes: dict[int, StepSize] = {}
        # Steps that the first rank's host has computed, and when; others may be at their ends, as far as is known.
        self._ending: tuple[tuple[float, StepSize], ...] = ()

    def count(self, hidden_size: int) -> None:
        """Note that ranks count layers of this size from now on."""
        self._patience = self._patience.of_layers(hidden_size)

    def launched(self, step: int, size: StepSize) -> None:
        """Note that a step is under way; the thread of the steps calls it."""
        # Other threads read it.
        sizes = {**self._sizes, step: size}
        if len(sizes) > _UNDER_WAY:
            del sizes[next(iter(sizes))]
        self._sizes = sizes

    def finished(self, step: int, now: float) -> None:
        """Note that the first rank's host or all devices have finished this step and all before it; the same thread
        calls it."""
        if self._patience.layer_position_s is not None:
            ended = tuple((now, size) for other, size in self._sizes.items() if other <= step)
            self._ending = (*self._ending, *ended)[-_UNDER_WAY:]
        self._sizes = {other: size for other, size in self._sizes.items() if other > step}

    def found(self, now: float) -> str | None:
        """Return what hangs, in a sentence; None if nothing does."""
        patience = self._patience
        # A rank whose host computes since before a step's end on the first one may be in that step.
        oldest = min((each.works_since for each in self._others if each.works_since is not None), default=now)
        sizes = [*self._sizes.values(), *(size for at, size in self._ending if at >= oldest)]
        positions, embeddings = sum(size.positions for size in sizes), sum(size.embeddings for size in sizes)
        more_s = patience.position_s * (positions + embeddings)
        # What a tower's layer computes for an embedding, its size does not say.
        layer_s = patience.position_s * embeddings + (patience.layer_position_s or 0.0) * positions
        layer_s += patience.attended_s * sum(size.attended for size in sizes)
        stuck = self._in_one_step(now, more_s, layer_s) or self._late(now, more_s) or self._late_on_device(now, more_s)
        if stuck is not None:
            return f"Rank {stuck.rank} is stuck in a step."
        exchange_s = (
            more_s if patience.layer_position_s is None else patience.factor * POSITION_S * (positions + embeddings)
        )
        if self._all_in_one_collective(now, exchange_s):
            return "All ranks are in the same collective, which does not end."
        still_s = self._still_s(now)
        if still_s > self._patience.factor * DEVICE_S + more_s:
            return f"The devices have not finished a step {still_s:.0f} s after all ranks had launched it."
        return None

    def _in_one_step(self, now: float, more_s: float, layer_s: float) -> RankProgress | None:
        """Return a rank whose host does not come back from a step, or from a layer where these are counted."""
        factor, counts = self._patience.factor, self._patience.layer_position_s is not None
        usual_s = factor * STUCK_S + layer_s if counts else factor * COMPILING_S + more_s
        for each in (self._own, *self._others):
            limit_s = factor * WORKING_S + more_s if each.unbounded else usual_s
            if each.works_since is not None and now - each.works_since > limit_s:
                return each
        return None

    def _late(self, now: float, more_s: float) -> RankProgress | None:
        """Return a rank that has not reached a collective in which another one waits.

        While the first rank is in no step, such as after an interrupt, others may wait for it without end. When it goes
        on, it reaches them soon: only the time since then counts.
        """
        own = self._own
        if own.waits_since is None and own.device_since is None and own.works_since is None:
            self._busy_since = None
            return None
        if self._busy_since is None:
            self._busy_since = now
        busy_since = self._busy_since
        long_s = self._patience.factor * COMPILING_S + more_s
        limit_s = self._patience.stuck_s if self._patience.alike else long_s
        waits = [
            each
            for each in (own, *self._others)
            if each.waits_since is not None and now - max(each.waits_since, busy_since) > limit_s
        ]
        if not waits:
            return None
        reached = max(each.entered for each in waits)
        late = [
            each
            for each in self._others
            if now - max(each.entered_at, busy_since) > (long_s if each.unbounded else limit_s)
            and (each.entered < reached or not self._lockstep)
        ]
        if late:
            # Of stages, one may wait for another that does not come.
            return next((each for each in late if each.waits_since is None), late[0])
        if own.works_since is None or (self._lockstep and own.entered >= reached):
            return None
        return own if now - own.works_since > long_s else None

    def _all_in_one_collective(self, now: float, exchange_s: float) -> bool:
        """Whether ranks that begin the same collectives have all begun one, and none comes out.

        Such as one whose connection between hosts neither delivers nor breaks.
        """
        every = (self._own, *self._others)
        counts = self._patience.layer_position_s is not None
        limit_s = exchange_s + (self._patience.factor * STUCK_S if counts else self._patience.stuck_s)
        return (
            self._lockstep
            and len({each.entered for each in every}) == 1
            and all(each.waits_since is not None and now - each.entered_at > limit_s for each in every)
        )

    def _late_on_device(self, now: float, more_s: float) -> RankProgress | None:
        """Return a rank whose host has not launched all that the first rank's device may wait for."""
        since = self._own.device_since
        if since is None:
            return None
        for each in self._others:
            if (
                each.works_since is not None
                and now - max(since, each.works_since) > self._patience.factor * COMPILING_S + more_s
            ):
                return each
        return None

    def _still_s(self, now: float) -> float:
        """Return for how long the first rank has waited for its device while no host launched anything."""
        since = self._own.device_since
        return 0.0 if since is None else now - max(since, *(each.worked_at for each in self._others))
