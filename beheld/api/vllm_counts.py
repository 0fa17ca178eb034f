"""An engine's state and counts under vLLM's names, where both mean the same."""

from __future__ import annotations

from beheld.core.config import EngineConfig, ModelInfo
from beheld.engine.stats import EngineStats

__all__ = ["CACHE_CONFIG", "SLEEP_STATES", "cache_config", "values_of"]

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By the level at which an engine sleeps."""
CACHE_CONFIG = (
    *("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
    *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
)
"""What `cache_config` tells."""


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
        "external_prefix_cache_queries": held.external_queries,
        "external_prefix_cache_hits": held.external_hits,
        "mm_cache_queries": held.num_encoded + held.num_reused,
        "mm_cache_hits": held.num_reused,
    }


def cache_config(config: EngineConfig, info: ModelInfo, stats: EngineStats) -> dict[str, str]:
    """How an engine's KV cache is made, by the names of vLLM's configuration.

    Its size is that of the smallest cache group that keeps positions; 0 if none does.
    """
    num_blocks = stats.scheduler.num_blocks
    positions = [count for count, group in zip(num_blocks, info.paged_groups, strict=False) if group.state is None]
    tokens = min(positions, default=0) * config.block_size
    values = (
        *(config.block_size, sum(num_blocks), config.kv_dtype, config.prefix_caching, config.memory_fraction),
        *(tokens, f"{tokens / config.max_model_len:.2f}"),
    )
    return dict(zip(CACHE_CONFIG, map(str, values), strict=True))
