"""The engine's counters as vLLM's reader of metrics gives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from beheld.api.async_llm import EngineStats
from beheld.api.vllm_counts import values_of


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
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [
        Gauge(f"vllm:{name}", labels, value) if name in gauges else Counter(f"vllm:{name}", labels, int(value))
        for name, value in values_of(stats).items()
    ]


class RayPrometheusStatLogger:
    """What Ray Data names as a logger of an engine's figures: they are not passed on to Ray's own."""
