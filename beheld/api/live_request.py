"""A request that AsyncLLM has submitted: what has come of it, and when."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from beheld.api.collectors import RequestCollector
from beheld.core.outputs import RequestMetrics, RequestOutput, metrics_of


class Pieces(StrEnum):
    """The content of each output of a generator: everything so far, the new part, or everything at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


@dataclass(eq=False)
class LiveRequest:
    """A submitted request that has not ended.

    Attributes:
        collector: makes its outputs.
        request_ids: of the engine's requests, one for each answer.
        pieces: what each output holds.
        started, prepared: when it came and when its prompt was ready, on the monotonic clock.
        max_tokens: of each answer, if there is a bound.
        first_token: when the first token came.
        waited_s: seconds in the engine's queue.
        num_preemptions: by request of the engine, how often it was interrupted.
        last_tokens: when the last tokens of each of the engine's requests came.
        changed: set when there is something new to read.
    """

    collector: RequestCollector
    request_ids: tuple[str, ...]
    pieces: Pieces
    started: float
    prepared: float
    max_tokens: int | None = None
    first_token: float | None = None
    waited_s: float = 0.0
    num_preemptions: dict[str, int] = field(default_factory=dict)
    last_tokens: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # By the number of each answer.
    _num_tokens: dict[int, int] = field(default_factory=dict)
    _finish_reasons: dict[int, str] = field(default_factory=dict)

    async def next_output(self) -> Any:
        """Wait for something new, and return it in the form that was asked for.

        Raises:
            UserError, EngineError: the request failed.
        """
        await self.changed.wait()
        self.changed.clear()
        output = self.collector.delta() if self.pieces is Pieces.DELTA else self.collector.output()
        if output.error is not None:
            raise output.error
        output.milliseconds = self.milliseconds()
        if isinstance(output, RequestOutput):
            output.metrics = self.metrics(output)
        return output

    async def ended(self) -> Any:
        """The whole output, of a request whose answer is read only once it is complete.

        Raises:
            UserError, EngineError: the request failed.
        """
        await self.changed.wait()
        output = self.collector.output()
        if output.error is not None:
            raise output.error
        output.milliseconds = self.milliseconds()
        return output

    def milliseconds(self) -> dict[str, float]:
        """How long each part of its way took until now."""
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        return {
            "prepare": 1e3 * (self.prepared - self.started),
            "queue": 1e3 * self.waited_s,
            "prefill": max(0.0, 1e3 * (first - self.prepared - self.waited_s)),
            "decode": 1e3 * (now - first),
            "first_token": 1e3 * (first - self.started),
            "total": 1e3 * (now - self.started),
        }

    def metrics(self, output: RequestOutput) -> RequestMetrics:
        """What an output says of the request until then; called once with each output, in order."""
        for answer in output.outputs:
            before = self._num_tokens.get(answer.index, 0) if self.pieces is Pieces.DELTA else 0
            self._num_tokens[answer.index] = before + len(answer.token_ids)
            if answer.finish_reason is not None:
                self._finish_reasons[answer.index] = answer.finish_reason
        counts = self._num_tokens.values()
        made = metrics_of(sum(counts), self.started, self.prepared, self.waited_s, self.first_token, time.monotonic())
        if output.finished:
            made.num_answers, made.max_answer_tokens = len(self.request_ids), max(counts, default=0)
            made.max_tokens, made.finish_reasons = self.max_tokens, tuple(self._finish_reasons.values())
            made.num_preemptions = sum(self.num_preemptions.values())
        return made
