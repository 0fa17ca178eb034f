"""Memory -> Capacity: how many KV blocks there are, computed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import CapacityError
from beheld.models.out_of_memory import gib
from beheld.platform.registry import platform_of
from beheld.runner.cache.cache import DeviceCaches
from beheld.runner.cache.registry import make_caches
from beheld.runner.memory_share import MemoryShare
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 8 << 30


def measure(info: ModelInfo, config: EngineConfig, available: int) -> Capacity:
    """How many blocks each group gets of `available` bytes.

    All groups get enough for the same number of positions, but none more than it can use. A group of media items'
    states has no blocks of its own: what would be its share of memory says how many states may live at once.

    Raises:
        CapacityError: one sequence of max_model_len does not fit; the message says what would.
    """
    caches = make_caches(info)
    if not caches.all:
        # Nothing is kept of a prompt.
        return Capacity((), 0, config.max_encoder_tokens)
    per_block = [cache.block_bytes(config) for cache in caches.all]
    if config.num_blocks_override is not None:
        blocks = [cache.chosen_blocks(config.num_blocks_override + 1, config) for cache in caches.all]
    else:
        least = [cache.needed_blocks(config) for cache in caches.all]
        want = sum(n * p for n, p in zip(least, per_block, strict=True))
        if want > available:
            raise CapacityError(
                f"One sequence of {config.max_model_len} tokens needs {gib(want)} of KV cache; {gib(available)} are "
                "available.",
                _what_would_fit(info, config, available),
            )
        most = [cache.most_blocks(config) for cache in caches.all]
        blocks = _share(
            available, per_block, least, most, lambda level: [cache.share_of(level, config) for cache in caches.all]
        )
    kv_bytes = sum(b * p for b, p in zip(blocks, per_block, strict=True))
    _report(blocks, kv_bytes, caches, config)
    if caches.states is None:
        return Capacity(tuple(blocks), kv_bytes, config.max_encoder_tokens)
    states = caches.states.max_states(blocks[-1], config)
    logger.info("Room for %s states of media items, %s per item", f"{states:,}", f"{caches.states.spec.num_states:,}")
    return Capacity(tuple(blocks), kv_bytes, states)


def _what_would_fit(info: ModelInfo, config: EngineConfig, available: int) -> str:
    fitting = longest_that_fits(info, config, available)
    lower = f"Lower max_model_len to {fitting}, or give" if fitting >= config.block_size else "Give"
    if config.kv_cache_bytes is not None:
        return f"{lower} more memory (kv_cache_memory_bytes)."
    return f"{lower} more memory ({platform_of(config.device).cache_option}, kv_cache_memory_bytes)."


def longest_that_fits(info: ModelInfo, config: EngineConfig, available: int) -> int:
    """The greatest max_model_len, a multiple of the block size, of which one sequence fits; at most config's own."""
    caches = make_caches(info).all
    per_block = [cache.block_bytes(config) for cache in caches]
    low, high = 0, config.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        shorter = dataclasses.replace(config, max_model_len=middle)
        if sum(cache.needed_blocks(shorter) * p for cache, p in zip(caches, per_block, strict=True)) <= available:
            low = middle
        else:
            high = middle - 1
    return low if low == config.max_model_len else low // config.block_size * config.block_size


def _share(
    available: int, per_block: list[int], least: list[int], most: list[int], shares: Callable[[int], list[int]]
) -> list[int]:
    """As much for one group as for another, but no group gets less than it needs or more than it can use.

    `least` must fit.

    Args:
        shares: blocks of a group that keeps every position -> the blocks that each group takes next to them.
    """

    def at(level: int) -> list[int]:
        return [min(max(share, low), high) for share, low, high in zip(shares(level), least, most, strict=True)]

    low, high = 0, max(most)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(b * p for b, p in zip(at(middle), per_block, strict=True)) <= available:
            low = middle
        else:
            high = middle - 1
    return at(low)


def available_bytes(config: EngineConfig) -> int:
    """Bytes that are free now and may be taken: of the device, or of the host for a cache next to the weights."""
    platform = platform_of(config.device)
    if not platform.shares_host_memory:
        return MemoryShare.of(platform, config.memory_fraction).left_bytes()
    # All ranks are on this machine.
    wanted, ranks = env.CPU_KV_CACHE_GIB(), config.num_ranks
    if wanted:
        return int(wanted * 2**30) // ranks
    return min(int(platform.unused_bytes() * _CPU_SHARE / env.HOST_SHARES()), _CPU_MOST_BYTES) // ranks


def _report(blocks: list[int], kv_bytes: int, caches: DeviceCaches, config: EngineConfig) -> None:
    positions = [count for count, cache in zip(blocks, caches.tables, strict=False) if cache.spec.state is None]
    states = [count for count, cache in zip(blocks, caches.tables, strict=False) if cache.spec.state is not None]
    tokens = (min(positions, default=0) - 1) * config.block_size
    logger.info("Available KV cache memory: %.2f GiB", kv_bytes / 2**30)
    if positions:
        logger.info("%s KV cache size: %s tokens", platform_of(config.device).label, f"{tokens:,}")
        logger.info(
            "Maximum concurrency for %s tokens per request: %.2fx",
            f"{config.max_model_len:,}",
            tokens / config.max_model_len,
        )
    if states:
        logger.info("Recurrent states: %s, of sequences and of prefixes", f"{min(states) - 1:,}")
