"""The engine's counters as vLLM's reader of metrics gives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from beheld.api.async_llm import EngineStats


@dataclass
class Metric:
    """A value with a name and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int = 0


@dataclass
class Vector(Metric):
    """Counts by position."""

    values: list[int] = field(default_factory=list)


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """Counts of values up to a bound."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def of(stats: EngineStats, model: str) -> list[Metric]:
    """The counters under vLLM's names, where both mean the same."""
    labels = {"model_name": model, "engine": "0"}
    held = stats.scheduler
    total = sum(held.num_blocks)
    used = 1 - sum(held.num_free_blocks) / total if total else 0.0
    return [
        Gauge("vllm:num_requests_running", labels, held.num_running),
        Gauge("vllm:num_requests_waiting", labels, held.num_waiting),
        Gauge("vllm:kv_cache_usage_perc", labels, used),
        Counter("vllm:num_preemptions", labels, held.num_preemptions),
        Counter("vllm:prefix_cache_queries", labels, held.prefix_queries),
        Counter("vllm:prefix_cache_hits", labels, held.prefix_hits),
        Counter("vllm:mm_cache_queries", labels, held.num_encoded + held.num_reused),
        Counter("vllm:mm_cache_hits", labels, held.num_reused),
    ]


class RayPrometheusStatLogger:
    """What Ray Data names as a logger of an engine's figures: they are not passed on to Ray's own."""
