"""The sampler's state per row, and a batch's index tensors, rebuilt only when the batch changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beheld.core.errors import ParamsError
from beheld.core.params import LogitsProcessor, Sampling, num_arguments
from beheld.sample import filters
from beheld.sample.bad_words import BadWordRows, BadWordTable
from beheld.sample.filters import Edits, Filters
from beheld.sample.no_repeat_ngram import NoRepeatRows, NoRepeatTable
from beheld.sample.no_repeat_window import NoRepeatWindowTable, WindowRows
from beheld.sample.noise import mix_seed
from beheld.sample.penalties import Penalised, PenaltyTable
from beheld.sample.thinking import ThinkingRows, ThinkingTable, may_close
from beheld.sample.timestamps import TimestampRows, TimestampTable


@dataclass(eq=False)
class RowState:
    """One row: its parameters and the parts of its past that they need.

    Attributes:
        length: number of tokens before the one sampled last.
        slot: slot in the penalty table, if the row has penalties.
        bad_word_slot, no_repeat_slot, window_slot, timestamp_slot, thinking_slot: slots in the tables of bad words of
            several tokens, of repetitions, of repetitions within a window, of timestamps and of budgets of reasoning,
            if these can ban a token of the row.
        tokens: its tokens, kept on the host only for logits processors.
        processors: callables that take (prompt, generated, logits).
    """

    params: Sampling
    num_prompt: int
    mixed_seed: int
    length: int
    slot: int | None = None
    bad_word_slot: int | None = None
    no_repeat_slot: int | None = None
    window_slot: int | None = None
    timestamp_slot: int | None = None
    thinking_slot: int | None = None
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
        forcing: places of rows with forced tokens.
        reporting: places of rows that report log-probabilities.
        named_LN: the ids whose log-probabilities these rows report in place of the best; -1 fills the rows that name
            fewer. None if no row names any.
    """

    rows: tuple[int, ...]
    states: tuple[RowState, ...]
    phases: dict[int, tuple[bool, bool, bool]]
    edits: Edits | None
    penalised: Penalised | None
    bad_words: BadWordRows | None
    no_repeat: NoRepeatRows | None
    windows: WindowRows | None
    timestamps: TimestampRows | None
    thinking: ThinkingRows | None
    forcing: tuple[int, ...]
    processed: tuple[int, ...]
    random: RandomRows | None
    reporting: tuple[int, ...]
    reporting_L: Tensor
    named_LN: Tensor | None

    @functools.cached_property
    def keeps_tokens(self) -> bool:
        """True if later choices of some row depend on its tokens."""
        tables = (self.penalised, self.bad_words, self.no_repeat, self.windows, self.timestamps, self.thinking)
        return bool(self.processed) or any(table is not None for table in tables)

    @functools.cached_property
    def closing(self) -> bool:
        """True if the reasoning of some row may have to end."""
        return any(closes for _, _, closes in self.phases.values())

    @functools.cached_property
    def edited(self) -> bool:
        """True if some row's logits are changed before sampling."""
        of_history = self.penalised or self.bad_words or self.no_repeat or self.windows or self.timestamps
        return bool(self.edits or of_history or self.closing or self.processed or self.forcing)


class RowTable:
    """The states of all rows, and the composition of the last batch."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._states: list[RowState | None] = [None] * num_rows
        self._vocab_size = vocab_size
        self._device = device
        self._composition: Composition | None = None
        self.penalties = PenaltyTable(vocab_size, device)
        self.bad_words = BadWordTable(vocab_size, device)
        self.no_repeat = NoRepeatTable(vocab_size, device)
        self.windows = NoRepeatWindowTable(vocab_size, device)
        self.timestamps = TimestampTable(vocab_size, device)
        self.thinking = ThinkingTable(device)

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
        state.bad_word_slot = self.bad_words.admit(params, token_ids, num_prompt)
        state.no_repeat_slot = self.no_repeat.admit(params, token_ids, num_prompt)
        state.window_slot = self.windows.admit(params, token_ids, num_prompt)
        state.timestamp_slot = self.timestamps.admit(params, token_ids, num_prompt)
        state.thinking_slot = self.thinking.admit(params, token_ids, num_prompt)
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
        if state.bad_word_slot is not None:
            self.bad_words.release(state.bad_word_slot)
        if state.no_repeat_slot is not None:
            self.no_repeat.release(state.no_repeat_slot)
        if state.window_slot is not None:
            self.windows.release(state.window_slot)
        if state.timestamp_slot is not None:
            self.timestamps.release(state.timestamp_slot)
        if state.thinking_slot is not None:
            self.thinking.release(state.thinking_slot)
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
        bad_words = [(b, s.bad_word_slot) for b, s in enumerate(states) if s.bad_word_slot is not None]
        no_repeat = [(b, s.no_repeat_slot) for b, s in enumerate(states) if s.no_repeat_slot is not None]
        windows = [(b, s.window_slot) for b, s in enumerate(states) if s.window_slot is not None]
        thinking = [(b, s.thinking_slot) for b, s in enumerate(states) if s.thinking_slot is not None]
        timestamps = [(b, s.timestamp_slot) for b, s in enumerate(states) if s.timestamp_slot is not None]
        penalised = [(b, s.slot, s.params) for b, s in enumerate(states) if s.slot is not None]
        at_random = tuple(b for b, p in enumerate(params) if not p.greedy)
        reporting = tuple(b for b, p in enumerate(params) if p.logprobs is not None)
        return Composition(
            rows=rows,
            states=states,
            phases={b: phases[b] for b, p in enumerate(params) if p.min_tokens > 0 or p.first_forbidden or p.thinking},
            edits=filters.edits(params, [phase[:2] for phase in phases], self._vocab_size, self._device),
            penalised=self.penalties.gather(*zip(*penalised, strict=True)) if penalised else None,
            bad_words=self.bad_words.gather(*zip(*bad_words, strict=True)) if bad_words else None,
            no_repeat=self.no_repeat.gather(*zip(*no_repeat, strict=True)) if no_repeat else None,
            windows=self.windows.gather(*zip(*windows, strict=True)) if windows else None,
            timestamps=self.timestamps.gather(*zip(*timestamps, strict=True)) if timestamps else None,
            thinking=self.thinking.gather(*zip(*thinking, strict=True)) if thinking else None,
            forcing=tuple(b for b, p in enumerate(params) if p.forced_ids),
            processed=tuple(b for b, s in enumerate(states) if s.processors),
            random=self._random_rows(states, at_random) if at_random else None,
            reporting=reporting,
            reporting_L=self._upload(reporting),
            named_LN=self._named([params[b].logprob_ids for b in reporting]),
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
