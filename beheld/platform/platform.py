"""What the engine asks of the device that it runs on: capabilities, memory, events, graphs, number types, faults.

A platform is one kind of device. It is chosen once (`registry.choose`), and found again from a tensor's device
(`registry.platform_of`). To add a vendor, write one more file that answers this protocol and one that states its
`Driver`, and list them in `registry.py` and `probe.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Defaults:
    """Options of an engine where the user sets none.

    Attributes:
        max_num_seqs, max_num_batched_tokens: as in EngineConfig.
        pooled_seqs, pooled_tokens: the same for small models whose prompts are pooled: launching a step takes the host
            longer than such a model computes.
        processor_cache_gib: memory of the host for processed media.
        overlap: the next step is planned while the device computes.
        max_step_s: as in EngineConfig.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    pooled_seqs: int
    pooled_tokens: int
    processor_cache_gib: float
    overlap: bool
    max_step_s: float


@dataclass(frozen=True)
class KernelFacts:
    """What the shape of a Triton kernel's launch depends on.

    Attributes:
        multiprocessors: how many the device has.
        side_by_side: programs that surely run at the same time, so that they may wait for one another.
        shared_bytes: shared memory that one program may ask for.
        copies_tiles: the hardware copies whole tiles into shared memory by itself.
        early_launch: a kernel may start before the one before it has ended ("programmatic dependent launch").
        warpgroup_products: it has Hopper's matrix products that run while their warps go on (`wgmma`), which neither
            older nor later hardware has.
    """

    multiprocessors: int
    side_by_side: int
    shared_bytes: int
    copies_tiles: bool
    early_launch: bool
    warpgroup_products: bool = False


@dataclass(frozen=True)
class Needs:
    """What hardware or software some capabilities need that not all devices of a platform have, in words for messages.

    Attributes:
        fp8_products: the device, after "It needs".
        grouped_products: a sentence that says how weights of few bits are multiplied in groups; empty where nothing
            helps.
        int8_rows: a sentence that says how int8 weights are multiplied by activations rounded by row; likewise.
        warpgroup_products: the devices' name, after "a kernel for"; empty where there are none.
    """

    fp8_products: str = "a device that multiplies FP8 numbers"
    grouped_products: str = ""
    int8_rows: str = ""
    warpgroup_products: str = ""


class Event(Protocol):
    """A moment in the device's work; methods and units are those of torch's events."""

    def record(self) -> None:
        """The moment is now: when all that has been launched by now is done."""

    def synchronize(self) -> None:
        """Wait for it."""

    def query(self) -> bool:
        """True if it has come."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one; both have come and were made with `timing`."""


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Launch them again, on the same addresses."""


class Graphs(Protocol):
    """Records what is launched, so that it can be launched again by one call."""

    def new_pool(self) -> Any:
        """A memory pool that several graphs share."""

    def new_stream(self) -> Any:
        """A stream to record on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block, `stream` is the current one."""

    def recording(self, pool: Any, *, relaxed: bool) -> AbstractContextManager[Graph]:
        """Within the block, what is launched on the current stream is recorded, not run.

        After an error nothing is recorded any more, and `pool` must not be used for another graph.

        Args:
            pool: where the graph takes its memory.
            relaxed: calls that no graph can hold, such as loading a kernel, are allowed; otherwise this thread's are
                refused.

        Raises:
            RuntimeError: no graph can hold what was launched.
        """

    def refusing_to_wait(self) -> AbstractContextManager[None]:
        """Within the block, what would wait for the device raises a RuntimeError; in all threads, so keep it short."""

    def waited(self, error: RuntimeError) -> bool:
        """True if `refusing_to_wait` raised this error."""


class PeerMemory(Protocol):
    """Memory of this process's device that the devices of other processes write to directly.

    All methods raise a RuntimeError where the hardware or the driver does not allow it.
    """

    handle_bytes: int
    """Size of a handle."""

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Take zeroed memory; returns its address, and the handle by which another process opens it."""

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of memory that another one allocated."""

    def close(self) -> None:
        """Give all of it back; nothing on any device uses it any more."""


class Collectives(Protocol):
    """The library that sums, gathers and sends tensors between several devices, from where they are."""

    @property
    def name(self) -> str:
        """Its name in log lines."""

    def hold(self, interface: str | None) -> None:
        """Prepare this process for a group of ranks, which calls `leave` in the end.

        Args:
            interface: of the network, by which ranks connect; None if its name is not known.

        Raises:
            ConfigError: earlier groups of this process keep the library from what this one needs.
        """

    def leave(self) -> None:
        """A group has ended that called `hold`."""

    def group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        """Connect ranks; returns a process group of torch.distributed, which another thread may abort.

        Its calls run in order, on each device's current stream where asyncOp is false.

        Args:
            store: where ranks meet, for this group alone.
            limit: how long a call may wait for other ranks.
        """


class Platform(Protocol):
    """One kind of device, and what the engine may expect of it."""

    def __hash__(self) -> int:
        """There is one object of each kind, and it equals no other."""

    @property
    def name(self) -> str:
        """As the option `device` and torch name it."""

    @property
    def label(self) -> str:
        """Its kind in log lines and messages: "CPU", "GPU"."""

    @property
    def place(self) -> str:
        """Where its memory is, in messages: "on the GPU"."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def defaults(self) -> Defaults:
        """Options of an engine where the user sets none."""

    @property
    def ignored_options(self) -> tuple[str, ...]:
        """Options of EngineArgs that change nothing here."""

    @property
    def cache_option(self) -> str:
        """The option, other than kv_cache_memory_bytes, that gives the KV cache more memory."""

    # ---- capabilities

    @property
    def shares_host_memory(self) -> bool:
        """The device's memory is the host's, so that nothing is copied between the two."""

    @property
    def synchronous(self) -> bool:
        """Work is done when the call that launches it returns, by the host's own cores. Reading a number back costs
        nothing, and launching costs no more than computing."""

    @property
    def splits(self) -> bool:
        """A machine may have several of these devices, each with memory of its own."""

    @property
    def num_devices(self) -> int:
        """How many of these devices this process may use."""

    @property
    def collectives(self) -> Collectives | None:
        """What sums tensors of several of these devices; None if their hosts do, by gloo."""

    @property
    def pinned_memory(self) -> bool:
        """Copies from pinned host memory run while the host works on."""

    @property
    def compiles_layers(self) -> bool:
        """Decoder layers gain from torch.compile."""

    @property
    def packs_linears(self) -> bool:
        """Linear layers in types that the device multiplies in hardware are fastest with packed weights; others with
        padded rows."""

    @property
    def one_row_kernels(self) -> bool:
        """There are kernels of our own for products of a single row."""

    @property
    def sampler_kernels(self) -> bool:
        """There are kernels of our own that choose tokens."""

    @property
    def dense_decode_cache(self) -> bool:
        """Decoding gains from a dense copy of what each sequence sees, in addition to the paged cache."""

    @property
    def has_triton(self) -> bool:
        """Kernels written in Triton run here."""

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that the device could run, the best first, installed or not."""

    @property
    def flash_attention(self) -> bool:
        """FlashAttention-3 is built for this hardware."""

    @property
    def fp8_products(self) -> bool:
        """The device multiplies FP8 numbers."""

    @property
    def fp8_block_products(self) -> bool:
        """torch multiplies FP8 numbers with a scale for each block of 128 by 128 of the second matrix."""

    @property
    def grouped_products(self) -> bool:
        """torch multiplies groups of rows by a matrix each, in one call that waits for nothing."""

    @property
    def bfloat16_products(self) -> bool:
        """The device multiplies bfloat16 in hardware."""

    @property
    def float16_products(self) -> bool:
        """The device multiplies float16 in hardware."""

    @property
    def int8_products(self) -> bool:
        """The device multiplies unsigned by signed numbers of 8 bits in hardware, with sums in 32 bits, in torch."""

    @property
    def no_grouped_products(self) -> str | None:
        """Why weights of few bits in groups are not multiplied as they are, in words; None if they are."""

    @property
    def no_int8_rows(self) -> str | None:
        """Why int8 weights with a scale for each output are not multiplied by activations that are rounded by row, in
        words; None if they are."""

    @property
    def needs(self) -> Needs:
        """What capabilities need that not all of these devices have."""

    @property
    def graphs(self) -> Graphs | None:
        """What records launches; None if nothing does."""

    # ---- number types

    def default_dtype(self, stored: str) -> tuple[str, str | None]:
        """The type to compute in for a checkpoint in type `stored`, and why if it is another one."""

    def exact_float32(self) -> AbstractContextManager[Any]:
        """Within the block, float32 is computed in float32, also where a library would round its operands."""

    # ---- memory

    def is_available(self) -> bool:
        """True if this process can use such a device."""

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory that can be had, and all of them."""

    def unused_bytes(self) -> int:
        """Bytes that nothing uses, not even a cache of the system that it would give up."""

    def reserved_bytes(self) -> int:
        """Bytes that this process holds, whether in use or kept for later."""

    def allocated_bytes(self) -> int:
        """Bytes that tensors of this process take."""

    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` has been since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin to measure `peak_bytes` anew."""

    def empty_cache(self) -> None:
        """Give memory back that is kept for later."""

    def reserve(self, sizes: Iterable[int]) -> int:
        """Take unused memory for weights of these sizes in bytes, in the pieces that they will fill; returns how much.

        Raises:
            torch.OutOfMemoryError: there is not so much.
        """

    # ---- work

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""

    def event(self, *, timing: bool = False) -> Event:
        """An event of this device; one made with `timing` also knows the time."""

    def uploader(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What brings host tensors to `device` while steps run there."""

    def peer_memory(self) -> PeerMemory | None:
        """Memory that other processes' devices write to; None if there is no such thing.

        Raises:
            RuntimeError: the driver refuses.
        """

    def kernel_facts(self, device: torch.device) -> KernelFacts:
        """What the shape of a kernel's launch depends on."""

    def rank_environment(self, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
        """What to change in the environment of a rank's process, so that its own device is the first one there."""

    # ---- faults

    def out_of_memory_count(self) -> int:
        """How often memory of the device has run out in this process."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if an error says that memory of the device has run out."""

    def fault(self, error: Exception, device: torch.device) -> str | None:
        """What the device said if it is lost with this error; None if other steps can go on.

        Where the error does not tell, the device is asked, which waits for it.
        """

    # ---- words

    def unavailable(self) -> tuple[str, str]:
        """Why there is none, and what to do, where `is_available` is false."""

    def describe(self) -> str:
        """The device of this process in a line, for `doctor`."""
