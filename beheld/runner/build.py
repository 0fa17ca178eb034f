"""A runner from a checkpoint: load the model, measure the memory, allocate, and test the seams."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from beheld.attention.backend import AttentionBackend
from beheld.attention.cross import CrossBackend
from beheld.attention.packed import PackedBackend
from beheld.attention.select import select, select_cross
from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import BeheldError, CapacityError, ModelError, first_line
from beheld.models import compile_ahead, memory_ahead, registry
from beheld.models.adapter import ModelAdapter
from beheld.models.load import Weights, weigh
from beheld.models.out_of_memory import explained, gib
from beheld.parallel.group import RankGroup, RankGroups
from beheld.platform import host, pages
from beheld.platform.platform import Platform
from beheld.platform.registry import platform_of
from beheld.runner import capacity, memory_profile
from beheld.runner.cache.registry import make_caches
from beheld.runner.memory_share import MemoryShare
from beheld.runner.runner import ModelRunner
from beheld.utils.allocator import keep_freed_memory
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_ONE_THREAD_BYTES = 128 << 20

Backends = tuple[AttentionBackend, CrossBackend | None]
"""What computes the attention of a model's text, and to states of its items."""


def build_runner(
    hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool, groups: RankGroups | None = None
) -> ModelRunner:
    """Load and check everything; `runner.config` and `runner.capacity` are then final.

    Args:
        shrink: lower max_model_len to what fits, and say so, instead of refusing.
        groups: of the ranks that share the model. Each builds its own runner, and all get the same capacity.

    Raises:
        ModelError, CapacityError: with what to do.
    """
    keep_freed_memory()
    platform = platform_of(config.device)
    adapter, share = load(hf_config, info, config, groups)
    info, backends = adapter.info, backends_of(adapter, config)
    if share is None:
        available = config.kv_cache_bytes or capacity.available_bytes(config)
    else:
        with _tried(info), explained("run a full step", platform, "Lower max_num_batched_tokens or max_num_seqs."):
            reserved = _activation_bytes(adapter, backends, config)
        available = config.kv_cache_bytes or max(0, share.left_bytes() - reserved)
    measured = info
    if groups is not None:
        # Blocks are numbered once for all ranks.
        (available,) = groups.least([available])
        measured = adapter.widest
    if shrink:
        config = _shrunk(measured, config, available)
    return make_runner(adapter, backends, config, capacity.measure(measured, config, available), groups)


def load(
    hf_config: Any, info: ModelInfo, config: EngineConfig, groups: RankGroups | None = None, *, again: bool = False
) -> tuple[ModelAdapter, MemoryShare | None]:
    """Load the model of `info`, or this rank's part of it.

    Args:
        again: the capacity of the cache is known, and others may hold its memory until it is taken: the weights must
            fit into what is free, whether or not the engine's whole share is.

    Returns:
        Its adapter; and the engine's share of the device's memory, None if the device uses the host's.

    Raises:
        ModelError, CapacityError: with what to do.
    """
    ranks = None if groups is None else groups.shared
    piped = None if groups is None else groups.piped
    compile_ahead.begin(config, info.kv_groups)
    with memory_ahead.ahead(hf_config, info, config):
        share, weights_bytes = _begin(hf_config, info, config, again=again)
        adapter = _built(hf_config, info, config, weights_bytes, ranks, piped)
    return adapter, share


def _built(
    hf_config: Any,
    info: ModelInfo,
    config: EngineConfig,
    weights_bytes: int,
    ranks: RankGroup | None,
    piped: RankGroup | None,
) -> ModelAdapter:
    """The adapter of `load`; memory for this rank's weights, so many bytes, was found to be there."""
    platform = platform_of(config.device)
    if platform.shares_host_memory:
        pages.expect(weights_bytes)
    if platform.shares_host_memory and weights_bytes >= _ONE_THREAD_BYTES:
        # Before weights come on top of what imports read, and again at the end. A small model adds little to that peak.
        host.give_back_libraries()
    if platform.synchronous:
        # Loading runs trials, which are as small as the engine's steps.
        _choose_threads(weights_bytes, platform, config.num_ranks)
    adapter = registry.build(hf_config, info, config, ranks, piped)
    if not platform.synchronous:
        _choose_threads(weights_bytes, platform, config.num_ranks)
    return adapter


def make_runner(
    adapter: ModelAdapter, backends: Backends, config: EngineConfig, found: Capacity, groups: RankGroups | None = None
) -> ModelRunner:
    """Allocate the cache of this capacity for a loaded model, test the seams, and capture graphs.

    Raises:
        ModelError, CapacityError: with what to do.
    """
    ranks = None if groups is None else groups.shared
    piped = None if groups is None else groups.piped
    platform, info, (backend, cross_backend) = platform_of(config.device), adapter.info, backends
    with explained("hold the KV cache", platform, _less_cache(config), found.kv_bytes):
        runner = ModelRunner(adapter, backend, info, config, found, cross_backend, ranks, piped)
    with _tried(info), explained("run a step next to the KV cache", platform, _less_cache(config)):
        runner.self_test()
    if platform.shares_host_memory:
        host.give_back_libraries()
    # Prompts to be pooled never decode.
    if info.pooler is None and piped is None and platform.graphs is not None and not config.enforce_eager:
        reason = runner.caches.no_graph
        if reason is None:
            with explained("capture CUDA graphs", platform, f"{_less_cache(config)} Or set enforce_eager=True."):
                runner.capture_graphs()
        else:
            logger.info("Decode steps run without CUDA graphs: %s.", reason)
    encodes = info.pooler is not None and info.pooler.encodes
    if encodes and ranks is None and platform.graphs is not None and not config.enforce_eager:
        adapter.capture_calls()
    return runner


def backends_of(adapter: ModelAdapter, config: EngineConfig) -> Backends:
    """The backends that a loaded model needs; they keep copies of its cache."""
    platform, info = platform_of(config.device), adapter.info
    backend: AttentionBackend = PackedBackend()
    if info.kv_groups:
        backend = select(platform, config.attention_backend, info.both_ways, info.plain_attention)
    return backend, None if info.cross is None else select_cross(platform)


@contextmanager
def _tried(info: ModelInfo) -> Iterator[None]:
    """Within the block the model runs for the first time: what it raises then is the checkpoint's fault."""
    try:
        yield
    except BeheldError:
        raise
    except Exception as error:
        raise ModelError(
            f"{info.architecture} cannot compute a text: {type(error).__name__}: {first_line(error)}.",
            "Check that config.json belongs to these weights, or fetch the checkpoint again.",
        ) from error


def _begin(
    hf_config: Any, info: ModelInfo, config: EngineConfig, *, again: bool = False
) -> tuple[MemoryShare | None, int]:
    """Check that memory suffices for this rank's weights before any is read, and make room for them; see `load`.

    Returns:
        The engine's share of the device's memory, None if the device uses the host's; and the bytes of the weights.

    Raises:
        CapacityError: it does not; the message names what they take and what is free.
    """
    weights = weigh(hf_config, info, config)
    platform = platform_of(config.device)
    if platform.shares_host_memory:
        _check_host(weights, config)
        return None, weights.num_bytes
    share = MemoryShare.of(platform, config.memory_fraction)
    divides = config.kv_cache_bytes is None and not again
    if divides:
        share.check()
    most = share.limit_bytes if divides else share.free_bytes
    if weights.num_bytes > most:
        raise CapacityError(
            f"The weights of {info.name!r} take about {gib(weights.num_bytes)}, and the engine may take {gib(most)} of "
            f"the GPU's {gib(share.total_bytes)}, of which {gib(share.free_bytes)} are free.",
            "Raise gpu_memory_utilization." if weights.num_bytes < share.free_bytes and most < share.free_bytes
            else "Take a quantized or a smaller checkpoint, or a GPU with more memory.",
        )  # fmt: skip
    if config.load_format != "dummy":
        with explained("load the weights", platform, "End what else uses the GPU.", weights.num_bytes):
            platform.reserve(weights.sizes)
    return share, weights.num_bytes


def _check_host(weights: Weights, config: EngineConfig) -> None:
    """Check host memory. Weights in float32 are copied into another layout; others may stay in files, read as needed.

    Raises:
        CapacityError: they do not fit.
    """
    free, total = platform_of(config.device).memory()
    # All ranks are on this machine.
    needed = weights.num_bytes * config.num_ranks
    if needed <= free:
        return
    sizes = f"The weights take about {gib(needed)}, and {gib(free)} of this machine's {gib(total)} are free"
    if config.dtype == "float32":
        raise CapacityError(f"{sizes}.", "Take a smaller checkpoint, or set dtype='bfloat16', which takes half.")
    logger.warning("%s: it may be very slow, or be ended by the system.", sizes)


def _less_cache(config: EngineConfig) -> str:
    """What to change so that the KV cache leaves more memory."""
    if config.num_blocks_override is not None:
        return "Lower num_gpu_blocks_override."
    if config.kv_cache_bytes is not None:
        return "Lower kv_cache_memory_bytes."
    platform = platform_of(config.device)
    if platform.shares_host_memory:
        return f"Lower {platform.cache_option} or set kv_cache_memory_bytes."
    return f"Lower {platform.cache_option}, max_num_seqs or max_num_batched_tokens."


def _activation_bytes(adapter: ModelAdapter, backends: Backends, config: EngineConfig) -> int:
    """Memory that a step takes in addition to weights and cache, including what stays between steps."""
    info, (backend, cross_backend) = adapter.info, backends
    probe = ModelRunner(adapter, backend, info, config, Capacity((2,) * len(info.kv_groups)), cross_backend)
    captures = info.pooler is None and not config.enforce_eager and make_caches(info).no_graph is None
    found = memory_profile.measure(probe, adapter, info, config, captures=captures)
    del probe
    platform_of(config.device).empty_cache()
    logger.info("A full step takes %s of activations, choosing its tokens %s.", gib(found.text), gib(found.sampling))
    return found.reserved_bytes


def _choose_threads(weights_bytes: int, platform: Platform, num_ranks: int) -> None:
    """A large model on the host's cores uses all of them; all else runs on one thread, unless OMP_NUM_THREADS is set.

    Ranks on the host's cores share them.

    A small model's operations take microseconds: sharing them gains nothing on an idle machine, and on a busy one each
    waits for the thread that was put aside (6 M parameters, two busy cores: 4 ms a token against 20 to 200). With a
    device of its own the host only copies: shared by all cores, a copy waits for those that are preparing images.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    if platform.synchronous and weights_bytes >= _ONE_THREAD_BYTES:
        if num_ranks > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
        return
    torch.set_num_threads(1)
    logger.debug("The host computes on one thread.")


def _shrunk(info: ModelInfo, config: EngineConfig, available: int) -> EngineConfig:
    """The same configuration with a max_model_len whose cache fits into `available` bytes.

    Raises:
        CapacityError: not even a block does.
    """
    fitting = capacity.longest_that_fits(info, config, available)
    if fitting == config.max_model_len:
        return config
    if fitting < config.block_size:
        platform = platform_of(config.device)
        raise CapacityError(
            f"{gib(available)} are left for the KV cache, in which not even {config.block_size} tokens fit.",
            "Close other programs, or take a smaller model."
            if platform.shares_host_memory
            else f"Raise {platform.cache_option}, lower max_num_batched_tokens, or take a smaller model.",
        )
    logger.warning("Using max model len %d: %d does not fit into memory.", fitting, config.max_model_len)
    return dataclasses.replace(config, max_model_len=fitting)


def count_weights(hf_config: Any, info: ModelInfo, config: EngineConfig) -> Weights:
    """The size of the model that this configuration describes, or of one rank's part."""
    return weigh(hf_config, info, config)
