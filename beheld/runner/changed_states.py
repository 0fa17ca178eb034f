"""Which recurrent states the newest plans have changed: a state is overwritten, so its step cannot be computed twice.

Shapes: B sequences that sample, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from beheld.core.errors import StatesLostError
from beheld.core.plan import PromptLogprobs, SeqSlice, StepPlan
from beheld.pool.pooler import PooledValues


@dataclass(frozen=True, eq=False)
class Computed:
    """What a pass gives, before tokens are sampled.

    Attributes:
        slices: those that sample.
        logits_BV: their logits; with drafts, of all wanted positions. None if nothing is sampled.
        places_B: where in Rows.newest_P the sampled tokens go.
        best: what `greedy` makes of the logits, if the pass did that.
        prompt_logprobs: see StepResult.
        drafts: whether some slice checks draft tokens.
        aligned: the weights of transcripts that are complete; models with recurrent states give none.
    """

    slices: Sequence[SeqSlice] = ()
    logits_BV: Tensor | None = None
    places_B: Tensor | None = None
    best: tuple[Tensor, Tensor] | None = None
    prompt_logprobs: Mapping[int, PromptLogprobs] = field(default_factory=dict)
    drafts: bool = False
    aligned: Sequence[PooledValues] = ()

    def of(self, rows: set[int]) -> Computed:
        """What it gives for these rows alone."""
        prompts = {row: report for row, report in self.prompt_logprobs.items() if row in rows}
        found = [place for place, piece in enumerate(self.slices) if piece.row in rows]
        if self.logits_BV is None or self.places_B is None or not found:
            return Computed(prompt_logprobs=prompts)
        index = torch.tensor(found, device=self.logits_BV.device)
        best = None if self.best is None else (self.best[0][index], self.best[1][index])
        slices = [self.slices[place] for place in found]
        return Computed(slices, self.logits_BV[index], self.places_B[index], best, prompts)


@dataclass(eq=False)
class _LaunchedPlan:
    """A plan, the rows whose states it has changed, and what its pass gave if it failed after that."""

    id: int | None = None
    rows: set[int] = field(default_factory=set)
    kept: Computed | None = None


class ChangedStates:
    """Of a model with recurrent layers; for others, `recurrent` is False and nothing is kept.

    Args:
        sampled_elsewhere: another rank samples, and sampling may fail there when it does not here: what a pass gave is
            kept until the plan is forgotten.
        plans: how many of the newest plans may be launched again.
    """

    def __init__(self, *, recurrent: bool, sampled_elsewhere: bool = False, plans: int = 1) -> None:
        self._recurrent, self._elsewhere = recurrent, sampled_elsewhere
        self._plan = _LaunchedPlan()
        self._newest: deque[_LaunchedPlan] = deque(maxlen=plans)

    def computed(self, plan: StepPlan) -> Computed | None:
        """What an earlier launch of the plan computed, if it failed only afterwards; None if it computed nothing.

        Raises:
            StatesLostError: it failed amid a pass.
        """
        if not self._recurrent:
            return None
        known = next((each for each in self._newest if each.id == plan.id), None)
        if known is None:
            known = _LaunchedPlan(plan.id)
            self._newest.append(known)
        self._plan = known
        rows = {piece.row for piece in plan.slices}
        if rows.isdisjoint(known.rows):
            return None
        if known.kept is None:
            raise StatesLostError("A step failed after it had changed this sequence's states.")
        return known.kept.of(rows)

    def change(self, slices: Sequence[SeqSlice]) -> None:
        """A pass over these slices begins."""
        if self._recurrent:
            self._plan.rows.update(piece.row for piece in slices)

    @contextmanager
    def kept_if_failing(self, computed: Computed) -> Iterator[None]:
        """Keep what a pass gave if sampling from it fails: another attempt begins there."""
        try:
            yield
            if self._elsewhere and self._recurrent and self._plan.kept is None:
                self._plan.kept = computed
        except Exception:
            if self._recurrent and self._plan.kept is None:
                self._plan.kept = computed
            raise
