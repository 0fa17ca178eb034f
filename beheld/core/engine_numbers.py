"""The ranges of the engine's options that are numbers."""

from __future__ import annotations

import math

from beheld.core.config import EngineArgs
from beheld.core.errors import ConfigError

# Options that count processes, which are always set.
_COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_numbers(args: EngineArgs) -> None:
    """Check that options which are numbers are, and within their range.

    Raises:
        ConfigError: one is not; it names the option and the range.
    """
    lows = {
        "max_model_len": 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "block_size": 1,
        "num_gpu_blocks_override": 1,
        "mm_encoder_budget": 1,
        "kv_cache_memory_bytes": 1,
        "media_workers": 0,
        "max_loras": 1,
        "max_lora_rank": 1,
        "max_cpu_loras": 1,
        "max_logprobs": -1,
        "seed": -(2**63),
    }
    lows |= dict.fromkeys(_COUNTS, 1)
    for name, low in lows.items():
        value = getattr(args, name)
        if value is None and name not in _COUNTS:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be a whole number from {low}, got {value!r}.", param=name)
    for name, high in (("gpu_memory_utilization", 1.0), ("mm_processor_cache_gb", math.inf)):
        value = getattr(args, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= high:
            raise ConfigError(f"{name} must be a number from 0 to {high:g}, got {value!r}.", param=name)
    if args.gpu_memory_utilization == 0.0:
        raise ConfigError("gpu_memory_utilization must be above 0.", param="gpu_memory_utilization")
