"""Counters of the engine."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    scheduler: SchedulerStats
    steps: int
    retried: int
    encode_s: float = 0.0
    num_unread: int = 0
    held_bytes: int | None = None
