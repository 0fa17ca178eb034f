"""A header that tells gateways the load: the ORCA report of named metrics, as vLLM writes it."""

from __future__ import annotations

import json

from beheld.api.async_llm import EngineStats
from beheld.api.vllm_counts import values_of

# A request's header with the form that it wants, and the answer's.
FORMAT, HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"
_NAMED = ("kv_cache_usage_perc", "num_requests_waiting")


FORMS = ("TEXT", "JSON")


def report(form: str, stats: EngineStats) -> str:
    """The header's value in one of the forms."""
    values = values_of(stats)
    named = {name: float(values[name]) for name in _NAMED}
    if form == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
    return "JSON " + json.dumps({"named_metrics": named})
