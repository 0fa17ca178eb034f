"""Memory -> Capacity: how many KV blocks there are, computed and checked."""

from __future__ import annotations

import dataclasses

import torch

from beheld.core.config import Capacity, EngineConfig, KVGroup, ModelInfo
from beheld.core.errors import CapacityError
from beheld.models.out_of_memory import gib
from beheld.platform.registry import platform_of
from beheld.runner.share import Share
from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 8 << 30


def measure(info: ModelInfo, config: EngineConfig, available: int) -> Capacity:
    """How many blocks each group gets of `available` bytes.

    All groups get enough for the same number of positions, but a sliding group never more than its windows can use, and
    a cross group never more than `config.max_encoder_tokens` states. It has no blocks of its own: what would be its
    share of memory says how many states may live at once.

    Raises:
        CapacityError: one sequence of max_model_len does not fit; the message says what would.
    """
    most = [_most_blocks(group, config) for group in info.kv_groups]
    if config.num_blocks_override is not None:
        wanted = config.num_blocks_override + 1
        blocks = [m if g.kind == "cross" else min(wanted, m) if g.window else wanted
                  for g, m in zip(info.kv_groups, most, strict=True)]  # fmt: skip
    else:
        per_block, least = _block_bytes(info, config), _needed(info, config)
        want = sum(n * p for n, p in zip(least, per_block, strict=True))
        if want > available:
            raise CapacityError(
                f"One sequence of {config.max_model_len} tokens needs {gib(want)} of KV cache; {gib(available)} are "
                "available.",
                _what_would_fit(info, config, available),
            )
        blocks = _share(available, per_block, least, most)
    kv_bytes = sum(b * p for b, p in zip(blocks, _block_bytes(info, config), strict=True))
    _report(blocks[: len(info.paged_groups)], kv_bytes, config)
    states = config.max_encoder_tokens
    if info.cross is not None:
        states = min(states, blocks[-1] * config.block_size)
        logger.info("Room for %s states beside the text, %s to an item", f"{states:,}", f"{info.cross.num_states:,}")
    return Capacity(tuple(blocks), kv_bytes, states)


def _what_would_fit(info: ModelInfo, config: EngineConfig, available: int) -> str:
    fitting = longest_that_fits(info, config, available)
    lower = f"Lower max_model_len to {fitting}, or give" if fitting >= config.block_size else "Give"
    if config.kv_cache_bytes is not None:
        return f"{lower} more memory (kv_cache_memory_bytes)."
    return f"{lower} more memory ({platform_of(config.device).cache_option}, kv_cache_memory_bytes)."


def longest_that_fits(info: ModelInfo, config: EngineConfig, available: int) -> int:
    """The greatest max_model_len, a multiple of the block size, of which one sequence fits; at most config's own."""
    per_block = _block_bytes(info, config)
    low, high = 0, config.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        least = _needed(info, dataclasses.replace(config, max_model_len=middle))
        if sum(n * p for n, p in zip(least, per_block, strict=True)) <= available:
            low = middle
        else:
            high = middle - 1
    return low if low == config.max_model_len else low // config.block_size * config.block_size


def _share(available: int, per_block: list[int], least: list[int], most: list[int]) -> list[int]:
    """As many blocks for one group as for another, but no group gets less than it needs or more than it can use.

    `least` must fit.
    """

    def at(level: int) -> list[int]:
        return [min(max(level, low), high) for low, high in zip(least, most, strict=True)]

    low, high = 0, max(most)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(b * p for b, p in zip(at(middle), per_block, strict=True)) <= available:
            low = middle
        else:
            high = middle - 1
    return at(low)


def _block_bytes(info: ModelInfo, config: EngineConfig) -> list[int]:
    """Of each group, what a block takes."""
    element_bytes = getattr(torch, config.kv_dtype).itemsize
    return [group.bytes_per_token(element_bytes) * config.block_size for group in info.kv_groups]


def _needed(info: ModelInfo, config: EngineConfig) -> list[int]:
    """Of each group, how many blocks one sequence of the greatest length needs, with the null block."""
    return [min(_blocks_of_one(g, config) + 1, _most_blocks(g, config)) for g in info.kv_groups]


def _blocks_of_one(group: KVGroup, config: EngineConfig) -> int:
    """Blocks that one sequence of the greatest length holds at once; of a cross group, those of one item."""
    if group.kind == "cross":
        return -(-group.num_states // config.block_size)
    tokens = config.max_model_len
    if group.window is not None:
        tokens = min(tokens, group.window + config.max_num_batched_tokens + config.block_size)
    return -(-tokens // config.block_size)


def _most_blocks(group: KVGroup, config: EngineConfig) -> int:
    """More than these would never be used: all rows full, as much again for cached prefixes, the null block."""
    if group.kind == "cross":
        return -(-config.max_encoder_tokens // config.block_size)
    if group.kind == "conv":
        # Inputs are large and soon forgotten: the last of each row, those of a step, as many for cached prefixes.
        assert group.window is not None
        kept = config.max_num_seqs * (1 + -(-group.window // config.block_size))
        return 2 * (kept + -(-config.max_num_batched_tokens // config.block_size)) + 1
    return 2 * config.max_num_seqs * _blocks_of_one(group, config) + 1


def available_bytes(config: EngineConfig) -> int:
    """Bytes that are free now and may be taken: of the device, or of the host for a cache next to the weights."""
    platform = platform_of(config.device)
    if not platform.shares_host_memory:
        return Share.of(platform, config.memory_fraction).left_bytes()
    wanted = env.CPU_KV_CACHE_GIB()
    if wanted:
        return int(wanted * 2**30)
    return min(int(platform.unused_bytes() * _CPU_SHARE), _CPU_MOST_BYTES)


def _report(blocks: list[int], kv_bytes: int, config: EngineConfig) -> None:
    tokens = (min(blocks) - 1) * config.block_size
    logger.info("Available KV cache memory: %.2f GiB", kv_bytes / 2**30)
    logger.info("%s KV cache size: %s tokens", platform_of(config.device).label, f"{tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{config.max_model_len:,}",
        tokens / config.max_model_len,
    )
