"""What the server counts, from what its parts tell it."""

from __future__ import annotations

from dataclasses import replace

from beheld.engine.stats import EngineStats
from beheld.scheduler.step_builder import SchedulerStats
from beheld.server.metrics import Metrics

COUNTS = SchedulerStats(
    num_running=0,
    num_waiting=0,
    num_free_blocks=(8,),
    num_blocks=(8,),
    num_cached_blocks=(0,),
    num_preemptions=0,
    prefix_queries=0,
    prefix_hits=0,
    num_embeds=0,
    max_embeds=8,
    num_encoded=0,
    num_reused=0,
)


def test_towers_are_a_stage_of_media() -> None:
    """Count and seconds are those of the engine, however often somebody looks."""
    metrics = Metrics()

    def seen(num: int, seconds: float) -> tuple[float, float, float]:
        stats = EngineStats(replace(COUNTS, num_encoded=num), 1, 0, seconds)
        lines = dict(line.rsplit(" ", 1) for line in metrics.text(stats, 0).decode().splitlines() if line[:1] != "#")
        name, labels = "beheld_media_stage_seconds", 'modality="all",stage="encode"'
        within = lines.get(f'{name}_bucket{{le="0.1",{labels}}}', 0)
        return (
            float(lines.get(f"{name}_count{{{labels}}}", 0)),
            float(lines.get(f"{name}_sum{{{labels}}}", 0)),
            float(within),
        )

    assert seen(0, 0.0) == (0, 0, 0)
    assert seen(2, 0.0) == (0, 0, 0), "launched, and not measured yet"
    assert seen(2, 0.1) == (2, 0.1, 2)
    assert seen(2, 0.1) == (2, 0.1, 2)
    count, total, within = seen(3, 0.6)
    assert (count, round(total, 9), within) == (3, 0.6, 2)
