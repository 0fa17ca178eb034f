"""The CPU as a device: its memory is the host's, and work is done when the call that launches it returns."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from beheld.platform import host, jit
from beheld.platform.platform import Defaults, Event, KernelFacts, Needs

_NO_MEMORY = ("can't allocate memory", "Unable to allocate", "out of memory")
# What the processor lists if it multiplies bfloat16 in hardware.
_BFLOAT16 = ("avx512_bf16", "amx_bf16")
_FLOAT16 = ("avx512_fp16", "amx_fp16", "asimdhp")
_INT8 = ("avx512_vnni", "avx_vnni", "amx_int8")


class _Moment:
    """An event on the clock: what was launched before it is done."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        """The moment is now."""
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """It has come."""

    def query(self) -> bool:
        """It has come."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one."""
        return float(end_event.seconds - self.seconds) * 1e3


class Cpu:
    """See Platform."""

    name = "cpu"
    label = "CPU"
    place = "on this machine"
    device = torch.device("cpu")
    defaults = Defaults(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        pooled_seqs=64,
        pooled_tokens=2048,
        processor_cache_gib=1.0,
        overlap=False,
        max_step_s=0.12,
    )
    ignored_options = ("gpu_memory_utilization", "enforce_eager")
    cache_option = "BEHELD_CPU_KV_CACHE_GIB"

    shares_host_memory = True
    synchronous = True
    splits = False
    num_devices = 1
    collectives = None
    pinned_memory = False
    compiles_layers = False
    packs_linears = True
    one_row_kernels = False
    sampler_kernels = False
    dense_decode_cache = True
    # Only in Triton's interpreter, which tests use.
    has_triton = False
    attention_backends = ("torch",)
    flash_attention = False
    fp8_products = False
    fp8_block_products = False
    grouped_products = True
    needs = Needs(grouped_products="On a CPU with AVX2, AVX512-VNNI or AVX-VNNI: pip install llvmlite.")
    graphs = None

    @property
    def bfloat16_products(self) -> bool:
        """See Platform."""
        flags = host.cpu_flags()
        return any(flag in flags for flag in _BFLOAT16)

    @property
    def float16_products(self) -> bool:
        """See Platform; without such instructions, a product of a large layer takes minutes."""
        flags = host.cpu_flags()
        return any(flag in flags for flag in _FLOAT16)

    @property
    def int8_products(self) -> bool:
        """See Platform; without such instructions, oneDNN's sums of pairs are cut off at 16 bits."""
        flags = host.cpu_flags()
        return any(flag in flags for flag in _INT8) and hasattr(torch.ops.onednn, "qlinear_pointwise")

    @property
    def no_grouped_products(self) -> str | None:
        """See Platform: kernels are compiled by LLVM, see quant/byte_products.py."""
        if host.byte_products() is None:
            return "this CPU has neither AVX2 nor AVX512-VNNI"
        missing = "the package llvmlite is not installed or cannot be loaded (pip install llvmlite)"
        return None if jit.available() else missing

    @property
    def no_int8_rows(self) -> str | None:
        """See Platform."""
        return "products on a CPU round activations by row and group"

    def default_dtype(self, stored: str) -> tuple[str, str | None]:
        """float32, unless the CPU multiplies the stored type in hardware."""
        if stored == "float16" or (stored == "bfloat16" and not self.bfloat16_products):
            return "float32", "which is faster on this CPU"
        return stored, None

    def exact_float32(self) -> AbstractContextManager[Any]:
        """Its libraries round nothing."""
        return nullcontext()

    def is_available(self) -> bool:
        """There is one everywhere."""
        return True

    def memory(self) -> tuple[int, int]:
        """See Platform."""
        return host.memory()

    def unused_bytes(self) -> int:
        """See Platform."""
        return host.unused_bytes()

    def reserved_bytes(self) -> int:
        """The resident bytes of this process."""
        return host.resident_bytes()

    def allocated_bytes(self) -> int:
        """The resident bytes of this process: tensors are not counted separately."""
        return host.resident_bytes()

    def peak_bytes(self) -> int:
        """The most of this process that has been in memory since `reset_peak`."""
        return host.peak_resident_bytes()

    def reset_peak(self) -> None:
        """See Platform."""
        host.reset_peak()

    def empty_cache(self) -> None:
        """What the C library keeps for later stays: see utils/allocator.py."""

    def reserve(self, sizes: Iterable[int]) -> int:
        """Weights take the host's memory as they are read."""
        return 0

    def synchronize(self) -> None:
        """All is done."""

    def event(self, *, timing: bool = False) -> Event:
        """See Platform."""
        return _Moment()

    def uploader(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Host tensors are where they should be."""
        return lambda host_tensor: host_tensor.to(device)

    def rank_environment(self, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Ranks share the cores."""
        return {}

    def peer_memory(self) -> None:
        """There is none."""
        return None

    def kernel_facts(self, device: torch.device) -> KernelFacts:
        """Of Triton's interpreter: few programs, one after the other, so that small tests split and do not split."""
        return KernelFacts(
            multiprocessors=4, side_by_side=1, shared_bytes=1 << 16, copies_tiles=False, early_launch=False
        )

    def out_of_memory_count(self) -> int:
        """Nobody counts; an error always names its cause."""
        return 0

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See Platform; what the system refuses to map is an OSError."""
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        return any(words in str(error) for words in _NO_MEMORY)

    def fault(self, error: Exception, device: torch.device) -> str | None:
        """A CPU that is lost tells nobody."""
        return None

    def unavailable(self) -> tuple[str, str]:
        """It never is."""
        raise AssertionError("there is a CPU everywhere")

    def describe(self) -> str:
        """The kinds of numbers that it multiplies in hardware."""
        return "bfloat16 in hardware" if self.bfloat16_products else "bfloat16 is slow"
