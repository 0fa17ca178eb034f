"""Counters of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from beheld.engine.routing import RoutingStats
from beheld.scheduler.step_builder import SchedulerStats


@dataclass(frozen=True)
class EngineStats:
    """Counters of the engine's parts since the start.

    Attributes:
        scheduler: queues, blocks, preemptions, prefix hits.
        steps: number of launched steps.
        retried: number of steps that failed and were retried one sequence at a time.
        encode_s: seconds of tower runs.
        num_unread: unreadable messages between the processes, in both directions.
        held_bytes: memory in use by the engine's process (allocator.held_bytes); None if unknown.
        engines: with data_parallel_size above 1, a report of each engine; the fields above are sums over them.
        routing: with data_parallel_size above 1, how requests were shared out.
    """

    scheduler: SchedulerStats
    steps: int
    retried: int
    encode_s: float = 0.0
    num_unread: int = 0
    held_bytes: int | None = None
    engines: tuple[EngineReport, ...] = ()
    routing: RoutingStats | None = None


class EngineState(StrEnum):
    """What an engine of several does now."""

    SERVING = "serving"
    SILENT = "silent"
    """It serves, and has not answered the last ping in time: it computes a long step, or hangs."""
    STARTING = "starting"
    """It has died, and its successor starts or waits for its next attempt."""


@dataclass(frozen=True)
class EngineReport:
    """One engine of several.

    Attributes:
        engine: its number.
        state: what it does.
        restarts: how often it was started anew.
        num_requests: requests that it has and that have not ended.
        load: the router's measure of them, in tokens.
        stats: its last counters, since its last start; None before the first.
    """

    engine: int
    state: EngineState
    restarts: int
    num_requests: int
    load: int
    stats: EngineStats | None


def total(parts: Sequence[EngineStats]) -> EngineStats:
    """The sums of the counters of several engines."""
    summed: dict[str, Any] = {
        field.name: _sum([getattr(part.scheduler, field.name) for part in parts]) for field in fields(SchedulerStats)
    }
    held = [part.held_bytes for part in parts if part.held_bytes is not None]
    return EngineStats(
        SchedulerStats(**summed),
        steps=sum(part.steps for part in parts),
        retried=sum(part.retried for part in parts),
        encode_s=sum(part.encode_s for part in parts),
        num_unread=sum(part.num_unread for part in parts),
        held_bytes=sum(held) if held else None,
    )


def _sum(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of tuples entry by entry; the union of sets."""
    if isinstance(values[0], frozenset):
        return frozenset().union(*values)
    if isinstance(values[0], tuple):
        return tuple(sum(column) for column in zip(*values, strict=True))
    return sum(values)
