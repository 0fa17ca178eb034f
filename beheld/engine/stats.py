"""Counters of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from beheld.scheduler.step_builder import SchedulerStats


@dataclass(frozen=True)
class EngineStats:
    """Counters of the engine's parts since the start.

    Attributes:
        scheduler: queues, blocks, preemptions, prefix hits.
        steps: how many were launched.
        retried: how many of them failed and were retried sequence by sequence.
        encode_s: seconds that towers have run.
        num_unread: messages between the processes, either way, that could not be read.
        held_bytes: memory that the engine's process holds (allocator.held_bytes); None if that cannot be known.
    """

    scheduler: SchedulerStats
    steps: int
    retried: int
    encode_s: float = 0.0
    num_unread: int = 0
    held_bytes: int | None = None
