"""A runner from a checkpoint: load the model, measure the memory, allocate, and test the seams."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch

from beheld.attention.backend import AttentionBackend
from beheld.attention.cross import CrossBackend
from beheld.attention.select import select, select_cross
from beheld.core.config import Capacity, EngineConfig, ModelInfo
from beheld.core.errors import CapacityError
from beheld.models import registry, towers
from beheld.models.adapter import ModelAdapter
from beheld.models.load import model_class_of, weights_bytes
from beheld.runner import capacity
from beheld.runner.runner import ModelRunner
from beheld.utils.allocator import keep_freed_memory
from beheld.utils.log import get_logger

logger = get_logger(__name__)

_ONE_THREAD_BYTES = 128 << 20
_GRAPH_BYTES = 1 << 30


def build_runner(hf_config: Any, info: ModelInfo, config: EngineConfig, *, shrink: bool) -> ModelRunner:
    """Load and check everything; `runner.config` and `runner.capacity` are then final.

    Args:
        shrink: lower max_model_len to what fits, and say so, instead of refusing.

    Raises:
        ModelError, CapacityError: with what to do.
    """
    keep_freed_memory()
    adapter = registry.build(hf_config, info, config)
    backend = select(config.device, config.attention_backend, info.both_ways)
    cross_backend = None if info.cross is None else select_cross(config.device)
    reserved = 0
    if config.device == "cpu":
        _choose_threads(adapter)
    else:
        _leave_cores_alone()
        reserved = _activation_bytes(adapter, backend, cross_backend, info, config)
    if shrink:
        config = _shrunk(info, config, reserved)
    runner = ModelRunner(adapter, backend, info, config, capacity.measure(info, config, reserved), cross_backend)
    runner.self_test()
    if config.device == "cuda" and not config.enforce_eager:
        if cross_backend is None:
            runner.capture_graphs()
        else:
            logger.info("Decode steps run without CUDA graphs: what they look at beside the text differs in length.")
    return runner


def _activation_bytes(
    adapter: ModelAdapter,
    backend: AttentionBackend,
    cross_backend: CrossBackend | None,
    info: ModelInfo,
    config: EngineConfig,
) -> int:
    """Memory that a step takes beside weights and cache: the peak of a full step, measured, and room for the rest.

    The rest: float32 copies of a full batch's logits while sampling, towers of one call, captured graphs.
    """
    probe = ModelRunner(adapter, backend, info, config, Capacity((2,) * len(info.kv_groups)), cross_backend)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    probe.dry_run(min(config.max_num_batched_tokens, config.max_model_len - 1))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del probe
    torch.cuda.empty_cache()
    sampling = 3 * 4 * config.max_num_seqs * info.vocab_size
    towers = peak if info.modalities else 0
    # A graph of a full step keeps memory of its own.
    graphs = 0 if config.enforce_eager or cross_backend is not None else peak
    logger.info("A full step takes %.2f GiB of activations.", peak / 2**30)
    return int(1.1 * (peak + sampling + towers + graphs)) + _GRAPH_BYTES


def _choose_threads(adapter: ModelAdapter) -> None:
    """A small model runs on one thread, unless OMP_NUM_THREADS says otherwise.

    Its operations take microseconds: sharing them gains nothing on an idle machine, and on a busy one each waits for
    the thread that was put aside (6 M parameters, two busy cores: 4 ms a token against 20 to 200).
    """
    if adapter.weights_bytes() < _ONE_THREAD_BYTES and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
        logger.debug("The model is small: computing on one thread.")


def _leave_cores_alone() -> None:
    """Beside a GPU the host only copies: shared by all cores, a copy waits for those that are preparing pictures."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _shrunk(info: ModelInfo, config: EngineConfig, reserved: int) -> EngineConfig:
    fitting = capacity.longest_that_fits(info, config, reserved)
    if fitting == config.max_model_len:
        return config
    if fitting < config.block_size:
        raise CapacityError(
            "There is not enough memory for a KV cache.", "Close other programs, or take a smaller model."
        )
    logger.warning("Using max model len %d: %d does not fit into memory.", fitting, config.max_model_len)
    return dataclasses.replace(config, max_model_len=fitting)


def count_weights(hf_config: Any, info: ModelInfo, config: EngineConfig) -> tuple[int, int]:
    """Number of parameters of the model that this configuration describes, and the bytes that they will take."""
    count = count_parameters(hf_config, info, config.limit_per_prompt)
    return count, weights_bytes(hf_config, info, config, count)


def count_parameters(hf_config: Any, info: ModelInfo, limits: Mapping[str, int] | None = None) -> int:
    """Number of parameters of the model that this configuration describes; no memory is taken for them.

    `limits` as in towers.without: what it leaves out is not counted.
    """
    with torch.device("meta"):
        model_class = towers.without(model_class_of(info, hf_config), info.model_type, limits or {})
        model = model_class._from_config(hf_config)
    return sum(parameter.numel() for parameter in model.parameters())
