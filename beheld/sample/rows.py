"""The sampler's state per row, and a batch's index tensors, rebuilt only when the batch changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beheld.core.errors import ParamsError
from beheld.core.logits_processors import LogitsProcessor, num_arguments
from beheld.core.sampling import Sampling
from beheld.sample import filters
from beheld.sample.bad_words import BadWordTable
from beheld.sample.filters import Edits, Filters
from beheld.sample.history import HistoryRule
from beheld.sample.no_repeat_ngram import NoRepeatTable
from beheld.sample.no_repeat_window import NoRepeatWindowTable
from beheld.sample.noise import mix_seed
from beheld.sample.penalties import Penalised, PenaltyTable
from beheld.sample.thinking import ThinkingTable, may_close
from beheld.sample.timestamps import TimestampTable


class TokenRule(Enum):
    """The rules that depend on what a row has generated."""

    BAD_WORDS = auto()
    NO_REPEAT = auto()
    NO_REPEAT_WINDOW = auto()
    TIMESTAMPS = auto()
    THINKING = auto()


_TABLES: dict[TokenRule, Callable[[int, torch.device], HistoryRule]] = {
    TokenRule.BAD_WORDS: BadWordTable,
    TokenRule.NO_REPEAT: NoRepeatTable,
    TokenRule.NO_REPEAT_WINDOW: NoRepeatWindowTable,
    TokenRule.TIMESTAMPS: TimestampTable,
    TokenRule.THINKING: lambda vocab_size, device: ThinkingTable(device),
}


@dataclass(eq=False)
class RowState:
    """One row: its parameters and the parts of its past that they need.

    Attributes:
        length: number of tokens before the one sampled last.
        slot: slot in the penalty table, if the row has penalties.
        slots: those in the tables of the rules that concern the row.
        tokens: its tokens, kept on the host only for logits processors.
        processors: callables that take (prompt, generated, logits).
    """

    params: Sampling
    num_prompt: int
    mixed_seed: int
    length: int
    slot: int | None = None
    slots: dict[TokenRule, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    processors: tuple[Callable[[list[int], list[int], Tensor], Any], ...] = ()

    def forced(self, length: int) -> int | None:
        """The forced token at position `length`, if there is one."""
        return next((token for position, token in self.params.forced_ids if position == length), None)

    def below_minimum(self, length: int) -> bool:
        """True while the answer is shorter than min_tokens."""
        return length - self.num_prompt < self.params.min_tokens

    def begins(self, length: int) -> bool:
        """True if the answer has no token yet."""
        return length == self.num_prompt

    def closes(self, length: int) -> bool:
        """True if the budget of the reasoning may be used up here."""
        rule = self.params.thinking
        return rule is not None and may_close(rule, length - self.num_prompt)

    def phase(self, length: int) -> tuple[bool, bool, bool]:
        """What of the bans on single tokens changes along the answer, and whether its reasoning may have to end."""
        begins = bool(self.params.first_forbidden) and self.begins(length)
        return self.below_minimum(length), begins, self.closes(length)


@dataclass(frozen=True, eq=False)
class RandomRows:
    """The rows of a batch that are sampled at random; the tensors are needed only off the CPU."""

    places: tuple[int, ...]
    mixed_R: NDArray[np.uint64]
    places_R: Tensor
    temperature_R1: Tensor
    filters: Filters | None


@dataclass(frozen=True, eq=False)
class Composition:
    """A batch's rows and what each needs: places (0 to B) of the rows concerned, and index tensors.

    Attributes:
        phases: place -> its answer's phase, for rows with bans that depend on it.
        rules: rule -> what it needs of the rows that it concerns, if there are any.
        forcing: places of rows with forced tokens.
        reporting: places of rows that report log-probabilities.
        named_LN: the ids whose log-probabilities these rows report in place of the best; -1 fills the rows that name
            fewer. None if no row names any.
        sampled_S: which of these rows, counted from 0 to L, report the logits that they are sampled from; None if none.
        unnormalised_L1: which of them report logits, not log-probabilities; None if none.
    """

    rows: tuple[int, ...]
    states: tuple[RowState, ...]
    phases: dict[int, tuple[bool, bool, bool]]
    edits: Edits | None
    penalised: Penalised | None
    rules: dict[TokenRule, Any]
    forcing: tuple[int, ...]
    processed: tuple[int, ...]
    random: RandomRows | None
    reporting: tuple[int, ...]
    reporting_L: Tensor
    named_LN: Tensor | None
    sampled_S: Tensor | None
    unnormalised_L1: Tensor | None

    @functools.cached_property
    def keeps_tokens(self) -> bool:
        """True if later choices of some row depend on its tokens."""
        return bool(self.processed or self.penalised is not None or self.rules)

    @functools.cached_property
    def closing(self) -> bool:
        """True if the reasoning of some row may have to end."""
        return any(closes for _, _, closes in self.phases.values())

    @functools.cached_property
    def edited(self) -> bool:
        """True if some row's logits are changed before sampling."""
        # That of reasoning changes nothing before its budget may be used up.
        of_history = self.penalised or self.rules.keys() - {TokenRule.THINKING}
        return bool(self.edits or of_history or self.closing or self.processed or self.forcing)


class RowTable:
    """The states of all rows, and the composition of the last batch."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._states: list[RowState | None] = [None] * num_rows
        self._vocab_size = vocab_size
        self._device = device
        self._composition: Composition | None = None
        self.penalties = PenaltyTable(vocab_size, device)
        self.rules = {rule: made(vocab_size, device) for rule, made in _TABLES.items()}

    def __getitem__(self, row: int) -> RowState:
        state = self._states[row]
        assert state is not None, f"row {row} holds no sequence"
        return state

    def admit(self, row: int, params: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Fill a row; filling it again with the same sequence changes nothing.

        Raises:
            ParamsError: a biased or allowed id is beyond the vocabulary, or a processor cannot be called.
        """
        self.release(row)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", [token for token, _ in params.logit_bias])
        processors = tuple(_with_prompt(p) for p in params.processors)
        state = RowState(params, num_prompt, mix_seed(params.seed), len(token_ids), processors=processors)
        if processors:
            state.tokens = list(token_ids)
        # Stored before taking any slot: `release` frees the slots, and admitting a row again starts with it.
        self._states[row] = state
        for rule, table in self.rules.items():
            slot = table.admit(params, token_ids, num_prompt)
            if slot is not None:
                state.slots[rule] = slot
        if params.has_penalties:
            state.slot = self.penalties.admit(params, token_ids, num_prompt)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise ParamsError(f"{name} holds {token}; the model has {self._vocab_size} tokens.", param=name)

    def release(self, row: int) -> None:
        """Free the row; on a free row this changes nothing."""
        state = self._states[row]
        if state is None:
            return
        for rule, slot in state.slots.items():
            self.rules[rule].release(slot)
        if state.slot is not None:
            self.penalties.release(state.slot)
        self._states[row] = None
        self._composition = None

    def compose(self, rows: Sequence[int], lengths: Sequence[int]) -> Composition:
        """The composition of a batch; reuses the last one if it had the same rows in the same phase."""
        last = self._composition
        if (
            last is None
            or last.rows != tuple(rows)
            or any(last.states[b].phase(lengths[b]) != phase for b, phase in last.phases.items())
        ):
            self._composition = last = self._make(tuple(rows), lengths)
        return last

    def _make(self, rows: tuple[int, ...], lengths: Sequence[int]) -> Composition:
        states = tuple(self[row] for row in rows)
        params = [state.params for state in states]
        phases = [state.phase(length) for state, length in zip(states, lengths, strict=True)]
        ruled: dict[TokenRule, list[tuple[int, int]]] = {}
        for b, state in enumerate(states):
            for rule, slot in state.slots.items():
                ruled.setdefault(rule, []).append((b, slot))
        penalised = [(b, s.slot, s.params) for b, s in enumerate(states) if s.slot is not None]
        at_random = tuple(b for b, p in enumerate(params) if not p.greedy)
        reporting = tuple(b for b, p in enumerate(params) if p.logprobs is not None)
        modes = [params[b].logprobs_mode for b in reporting]
        sampled = [place for place, mode in enumerate(modes) if mode.processed]
        logits = [[mode.logits] for mode in modes]
        return Composition(
            rows=rows,
            states=states,
            phases={b: phases[b] for b, p in enumerate(params) if p.min_tokens > 0 or p.first_forbidden or p.thinking},
            edits=filters.edits(params, [phase[:2] for phase in phases], self._vocab_size, self._device),
            penalised=self.penalties.gather(*zip(*penalised, strict=True)) if penalised else None,
            rules={rule: self.rules[rule].gather(*zip(*own, strict=True)) for rule, own in ruled.items()},
            forcing=tuple(b for b, p in enumerate(params) if p.forced_ids),
            processed=tuple(b for b, s in enumerate(states) if s.processors),
            random=self._random_rows(states, at_random) if at_random else None,
            reporting=reporting,
            reporting_L=self._upload(reporting),
            named_LN=self._named([params[b].logprob_ids for b in reporting]),
            sampled_S=self._upload(sampled) if sampled else None,
            unnormalised_L1=torch.tensor(logits).to(self._device, non_blocking=True) if [True] in logits else None,
        )

    def _named(self, ids: Sequence[tuple[int, ...]]) -> Tensor | None:
        most = max(map(len, ids), default=0)
        if not most:
            return None
        filled = [[*some, *[-1] * (most - len(some))] for some in ids]
        return torch.tensor(filled).to(self._device, non_blocking=True)

    def _random_rows(self, states: Sequence[RowState], places: tuple[int, ...]) -> RandomRows:
        params = [states[b].params for b in places]
        return RandomRows(
            places,
            np.array([states[b].mixed_seed for b in places], dtype=np.uint64),
            self._upload(places),
            torch.tensor([[p.temperature] for p in params]).to(self._device, non_blocking=True),
            filters.filters(params, self._vocab_size, self._device),
        )

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device, non_blocking=True)


def _with_prompt(processor: LogitsProcessor) -> Callable[[list[int], list[int], Tensor], Any]:
    """Adapt a processor of either form to take (prompt, generated, logits).

    Raises:
        ParamsError: it takes other arguments.
    """
    if num_arguments(processor) == 3:
        return processor
    return lambda prompt, generated, logits: processor(generated, logits)
