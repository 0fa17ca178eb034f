"""An engine's state and counts under vLLM's names, where both mean the same."""

from __future__ import annotations

from beheld.engine.stats import EngineStats


def values_of(stats: EngineStats) -> dict[str, float]:
    """By vLLM's names without their prefix."""
    held = stats.scheduler
    total = sum(held.num_blocks)
    return {
        "num_requests_running": held.num_running,
        "num_requests_waiting": held.num_waiting,
        "kv_cache_usage_perc": 1 - sum(held.num_free_blocks) / total if total else 0.0,
        "num_preemptions": held.num_preemptions,
        "prefix_cache_queries": held.prefix_queries,
        "prefix_cache_hits": held.prefix_hits,
        "mm_cache_queries": held.num_encoded + held.num_reused,
        "mm_cache_hits": held.num_reused,
    }
