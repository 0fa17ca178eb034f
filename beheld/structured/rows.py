"""The grammar state of every row: it makes a plan's masks and advances by the tokens of its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.plan import STUCK, Admission, StepPlan, StepResult, TokenLogprobs
from beheld.core.sampling import Sampling
from beheld.core.structured_outputs import Grammar
from beheld.structured.compile import Compiler


@dataclasses.dataclass(eq=False)
class _State:
    """A row's state machine; None after a failure.

    Attributes:
        reports_allowed: whether the row's candidates are reported without those that the grammar forbids.
        mask: then, that of the step in flight.
    """

    matcher: Any
    reports_allowed: bool = False
    mask: bytes = b""


class GrammarRows:
    """Follows plans and results; a sequence with a grammar has at most one step in flight.

    Attributes:
        compiler: compiles the grammars; cached ones cost no time here.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._states: dict[int, _State] = {}
        self._flights: dict[int, dict[int, _State]] = {}

    def forget(self) -> None:
        """All rows are free, and no step is in flight."""
        self._states.clear()
        self._flights.clear()

    def masked(self, plan: StepPlan) -> StepPlan:
        """The plan with masks for the rows that sample under a grammar."""
        for row in plan.released:
            self._states.pop(row, None)
        for admission in plan.admitted:
            self._states.pop(admission.row, None)
            params = admission.params
            if isinstance(params, Sampling) and params.grammar is not None:
                self._states[admission.row] = self._state(admission, params.grammar)
        if not self._states:
            return plan
        pieces = [piece for piece in plan.slices if piece.wanted and piece.row in self._states]
        if not pieces:
            return plan
        self._flights[plan.id] = {piece.row: self._states[piece.row] for piece in pieces}
        masks = {piece.row: self._masks(self._states[piece.row], piece.token_ids[1:]) for piece in pieces}
        for row in masks:
            if self._states[row].reports_allowed:
                self._states[row].mask = masks[row][0]
        return dataclasses.replace(plan, masks=masks)

    def advanced(self, result: StepResult) -> StepResult:
        """Advance each grammar by its row's tokens; returns the result with stuck rows marked as failed."""
        rows = self._flights.pop(result.plan_id, None)
        if rows is None:
            return result
        # Row -> number of its tokens that its grammar accepted before it was stuck.
        stuck: dict[int, int] = {}
        kept = {
            row: tuple(_allowed(entry, rows[row].mask) for entry in entries)
            for row, entries in result.logprobs.items()
            if row in rows and rows[row].mask
        }
        if kept:
            result = dataclasses.replace(result, logprobs={**result.logprobs, **kept})
        for row, state in rows.items():
            for index, token in enumerate(result.tokens.get(row, ())):
                if state.matcher is None or not state.matcher.consume_token(token):
                    state.matcher = None
                    stuck[row] = index
                    break
        return _with_stuck(result, stuck) if stuck else result

    def _state(self, admission: Admission, grammar: Grammar) -> _State:
        """The state machine after the tokens generated before a preemption, and those of the answer in the prompt."""
        try:
            matcher = self.compiler.matcher(grammar)
        except ParamsError:
            return _State(None)
        params = admission.params
        answered = (params.num_answered or 0) if isinstance(params, Sampling) else 0
        before = list(admission.token_ids[admission.num_prompt - answered :])
        followed = not before or matcher.consume_tokens(before)
        reports = isinstance(params, Sampling) and params.num_answered is not None
        return _State(matcher if followed else None, reports)

    def _masks(self, state: _State, draft_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The masks for the next token and after each draft token.

        After a draft token that the grammar does not allow, the mask allows everything: that draft is never sampled.
        """
        masks = [self._mask(state)]
        if draft_ids and state.matcher is not None:
            # Drafts may be wrong, so this advances a copy of the row's machine.
            ahead = _State(state.matcher.deep_copy())
            for token in draft_ids[: ahead.matcher.validate_tokens(list(draft_ids))]:
                if ahead.matcher is None or not ahead.matcher.consume_token(token):
                    break
                masks.append(self._mask(ahead))
        return (*masks, *[self._anything] * (1 + len(draft_ids) - len(masks)))

    def _mask(self, state: _State) -> bytes:
        """One bit per token, 32 per little-endian word."""
        if state.matcher is not None:
            # The library may append a word.
            mask: bytes = state.matcher.compute_bitmask()[: 4 * self.compiler.num_words]
            if not state.matcher.is_error() and any(mask):
                return mask
            state.matcher = None
        return self._anything

    @property
    def _anything(self) -> bytes:
        return b"\xff" * (4 * self.compiler.num_words)


def _allowed(entry: TokenLogprobs, mask: bytes) -> TokenLogprobs:
    """A report without the candidates that a mask forbids."""
    both = [
        (token, logprob)
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        if mask[token >> 3] >> (token & 7) & 1
    ]
    return dataclasses.replace(
        entry, top_ids=tuple(token for token, _ in both), top_logprobs=tuple(logprob for _, logprob in both)
    )


def _with_stuck(result: StepResult, stuck: Mapping[int, int]) -> StepResult:
    """The result with these rows failed after the given numbers of tokens."""
    tokens, logprobs = dict(result.tokens), dict(result.logprobs)
    for row, count in stuck.items():
        tokens[row] = tokens[row][:count]
        if row in logprobs:
            logprobs[row] = logprobs[row][:count]
    failed = {**result.failed, **dict.fromkeys(stuck, STUCK)}
    return dataclasses.replace(result, tokens=tokens, logprobs=logprobs, failed=failed)
