"""Compiles the functions that a model will want on a CPU in a thread, while the model's class is imported."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from beheld.attention import cpu_decode, cpu_prefill
from beheld.core.config import EngineConfig, KVGroup
from beheld.models.surgery import cpu_layer, fused_norms, vector_linear
from beheld.platform import host, jit
from beheld.platform.registry import platform_of
from beheld.quant import byte_products
from beheld.quant.availability import AT_LOAD_METHODS


def begin(config: EngineConfig, groups: Sequence[KVGroup] = ()) -> threading.Thread | None:
    """Start a thread that compiles functions before they are needed; returns None if there is nothing to compile.

    LLVM releases the interpreter's lock. A function that is needed earlier is compiled by its first caller.

    Args:
        groups: the model's cache groups.
    """
    wanted = list(_wanted(config, groups))
    if not wanted:
        return None

    def compile_all() -> None:
        for make in wanted:
            try:
                make()
            except RuntimeError:
                # This LLVM does not know an instruction. What wants the function finds that itself.
                continue

    thread = threading.Thread(target=compile_all, name="compile ahead")
    thread.start()
    return thread


def _wanted(config: EngineConfig, groups: Sequence[KVGroup]) -> Iterator[Callable[[], object]]:
    """List what makes the functions, those that are wanted first at the head."""
    platform = platform_of(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    products = host.byte_products()
    if not platform.packs_linears or products is None or not jit.available() or dtype not in byte_products.KINDS:
        return
    kind = byte_products.KINDS[dtype]
    grouped = config.quantization is not None and AT_LOAD_METHODS[config.quantization].in_groups
    if grouped and config.load_format != "dummy":
        yield lambda: byte_products.compiled_rounding(products.lanes, kind)
    if grouped:
        yield lambda: byte_products.compiled(products, kind)
    if config.enforce_eager or not (grouped or dtype == torch.bfloat16):
        return
    if dtype == torch.bfloat16:
        yield fused_norms.compiled_norm
        if platform.bfloat16_products:
            yield vector_linear.can_multiply
    if grouped:
        yield lambda: byte_products.compiled(products, "f32")
    yield lambda: cpu_layer.compiled_layers(kind)
    if dtype == torch.bfloat16 and config.kv_dtype == config.dtype:
        device = torch.device(config.device)
        alike = [group for group in groups if group.state is None and group.head_dim == group.value_dim]
        for size in {group.head_dim for group in alike if cpu_decode.has_steps(group.head_dim, None, device)}:
            yield functools.partial(cpu_prefill.compiles, size)
