"""The state of every row's grammar: masks for a plan, and the tokens of its result taken in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ParamsError
from beheld.core.plan import STUCK, Admission, StepPlan, StepResult
from beheld.structured.compile import Compiler


@dataclasses.dataclass(eq=False)
class _State:
    """A row's state machine; None once it has failed."""

    matcher: Any


class GrammarRows:
    """Follows plans and results; a sequence with a grammar has at most one token in flight.

    Attributes:
        compiler: where the grammars come from; what it holds already costs no time here.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._states: dict[int, _State] = {}
        self._flights: dict[int, dict[int, _State]] = {}

    def masked(self, plan: StepPlan) -> StepPlan:
        """The plan with the masks of those of its rows that sample under a grammar."""
        for row in plan.released:
            self._states.pop(row, None)
        for admission in plan.admitted:
            self._states.pop(admission.row, None)
            if admission.params.grammar is not None:
                self._states[admission.row] = self._state(admission)
        if not self._states:
            return plan
        rows = {
            piece.row: self._states[piece.row] for piece in plan.slices if piece.samples and piece.row in self._states
        }
        if not rows:
            return plan
        self._flights[plan.id] = rows
        return dataclasses.replace(plan, masks={row: self._mask(state) for row, state in rows.items()})

    def taken(self, result: StepResult) -> StepResult:
        """The result, in which rows whose grammar cannot go on have failed; its tokens move the others on."""
        rows = self._flights.pop(result.plan_id, None)
        if rows is None:
            return result
        failed: dict[int, str] = {}
        for row, state in rows.items():
            token = result.tokens.get(row)
            if token is None:
                continue
            if state.matcher is None or not state.matcher.consume_token(token):
                state.matcher = None
                failed[row] = STUCK
        return _with_failed(result, failed) if failed else result

    def _state(self, admission: Admission) -> _State:
        """The machine at the end of what was generated before a preemption."""
        assert admission.params.grammar is not None
        try:
            matcher = self.compiler.matcher(admission.params.grammar)
        except ParamsError:
            return _State(None)
        before = list(admission.token_ids[admission.num_prompt :])
        return _State(matcher if not before or matcher.consume_tokens(before) else None)

    def _mask(self, state: _State) -> bytes:
        """One bit for each token, 32 to a little-endian word."""
        if state.matcher is not None:
            # The library may append a word.
            mask: bytes = state.matcher.compute_bitmask()[: 4 * self.compiler.num_words]
            if not state.matcher.is_error() and any(mask):
                return mask
            state.matcher = None
        return b"\xff" * (4 * self.compiler.num_words)


def _with_failed(result: StepResult, failed: Mapping[int, str]) -> StepResult:
    tokens = {row: token for row, token in result.tokens.items() if row not in failed}
    return dataclasses.replace(result, tokens=tokens, failed={**result.failed, **failed})
