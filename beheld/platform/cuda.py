"""NVIDIA GPUs through CUDA: with `cuda_peers.py` the only file that calls `torch.cuda`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from beheld.platform import segments
from beheld.platform.cuda_driver import DRIVER
from beheld.platform.cuda_peers import CudaPeers
from beheld.platform.nccl import NCCL
from beheld.platform.platform import Collectives, Defaults, Event, Graph, Graphs, KernelFacts, Needs, PeerMemory
from beheld.platform.triton import HAS_TRITON
from beheld.utils import env
from beheld.utils.version import numbers_of

# From these compute capabilities on: bfloat16 and its grouped products (Ampere), FP8 (Ada), early starts (Hopper).
_AMPERE, _ADA, _HOPPER = (8, 0), (8, 9), (9, 0)
_NEEDS = Needs(
    fp8_products=f"a GPU of compute capability {_ADA[0]}.{_ADA[1]} or later",
    grouped_products=f"On a GPU of compute capability {_AMPERE[0]}.{_AMPERE[1]} or later: install Triton, and leave "
    "BEHELD_INT4_ON_GPU out.",
    int8_rows=f"On a GPU of compute capability {_AMPERE[0]}.{_AMPERE[1]} or later: install Triton, set "
    "BEHELD_INT8_ON_GPU=1, and leave dtype out or set it to 'bfloat16' or 'float16'.",
    warpgroup_products="Hopper",
)

_OUT_OF_MEMORY = "out of memory"
_NO_MEMORY = (_OUT_OF_MEMORY, "CUBLAS_STATUS_ALLOC_FAILED")
# How PyTorch and the libraries under it begin what a device said.
_DEVICE_SAYS = ("CUDA error:", "CUBLAS_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_EXECUTION_FAILED", "NCCL error")
# What it says of a launch that it did not begin, for sizes that it does not take. Nothing was computed, and the driver
# does not hold it against what comes.
_NOT_LAUNCHED = ("invalid configuration argument", "invalid argument", "too many resources requested for launch")
# What torch says where something waits for the device that must not.
_WAITED = "called a synchronizing CUDA operation"

# Ranks that BEHELD_ONE_GPU puts on a GPU, at most.
MAX_SHARING = 8
# Graphs that failed under a torch whose allocators still ask them which streams are theirs.
_abandoned: list[torch.cuda.CUDAGraph] = []


class Cuda:
    """See Platform."""

    name = "cuda"
    label = "GPU"
    place = "on the GPU"
    device = torch.device("cuda")
    defaults = Defaults(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        pooled_seqs=1024,
        pooled_tokens=32_768,
        processor_cache_gib=4.0,
        overlap=True,
        max_step_s=0.06,
    )
    ignored_options = ()
    cache_option = "gpu_memory_utilization"

    shares_host_memory = False
    synchronous = False
    splits = True
    pinned_memory = True
    compiles_layers = True
    packs_linears = False
    dense_decode_cache = False
    attention_backends = ("flash", "triton", "torch")
    needs = _NEEDS

    @property
    def num_devices(self) -> int:
        """See Platform."""
        return MAX_SHARING if env.ONE_GPU() else torch.cuda.device_count()

    @property
    def collectives(self) -> Collectives | None:
        """See Platform. NCCL refuses two ranks on one GPU."""
        return None if env.ONE_GPU() else NCCL

    def __init__(self) -> None:
        self.has_triton = HAS_TRITON
        self.one_row_kernels = HAS_TRITON
        self.sampler_kernels = HAS_TRITON
        self.graphs: Graphs | None = CudaGraphs()
        self._facts: dict[torch.device, KernelFacts] = {}

    @property
    def flash_attention(self) -> bool:
        """It is built for Hopper, and for nothing before or after it."""
        return torch.cuda.get_device_capability()[0] == _HOPPER[0]

    @property
    def float16_products(self) -> bool:
        """Every GPU that torch supports does."""
        return True

    @property
    def int8_products(self) -> bool:
        """torch's operator for them is a CPU's."""
        return False

    @property
    def no_grouped_products(self) -> str | None:
        """See Platform: a kernel multiplies 4 bits, see quant/int4_gpu.py."""
        return self._no_kernels(None if env.INT4_ON_GPU() else "BEHELD_INT4_ON_GPU=0")

    @property
    def no_int8_rows(self) -> str | None:
        """See Platform and quant/int8_gpu.py."""
        return self._no_kernels(None if env.INT8_ON_GPU() else "BEHELD_INT8_ON_GPU is not 1")

    def _no_kernels(self, unwanted: str | None) -> str | None:
        """Return why kernels of ours do not multiply weights of few bits; `unwanted`: what the user said."""
        if not self.has_triton:
            return "Triton is not installed"
        if unwanted is not None:
            return unwanted
        if not self.is_available():
            return "there is no GPU"
        return None if self.bfloat16_products else "this GPU's compute capability is below 8.0"

    @property
    def fp8_products(self) -> bool:
        """See Platform."""
        return torch.cuda.get_device_capability() >= _ADA

    @property
    def fp8_block_products(self) -> bool:
        """cuBLAS has them for Hopper alone, from CUDA 12.9 on."""
        newest = numbers_of(torch.version.cuda or "0") >= (12, 9)
        return torch.cuda.get_device_capability()[0] == _HOPPER[0] and newest

    @property
    def grouped_products(self) -> bool:
        """See Platform."""
        return torch.cuda.get_device_capability() >= _AMPERE

    @property
    def bfloat16_products(self) -> bool:
        """See Platform."""
        return torch.cuda.get_device_capability() >= _AMPERE

    def default_dtype(self, stored: str) -> tuple[str, str | None]:
        """The stored one."""
        return stored, None

    def exact_float32(self) -> AbstractContextManager[Any]:
        """Convolutions would run in TF32 otherwise, whose ten bits are not what float32 was asked for.

        Products of matrices do so only where the user's own program says it.
        """
        flags = torch.backends.cudnn
        # All others as they are: what is not named, this function sets to its own default.
        return flags.flags(flags.enabled, flags.benchmark, flags.benchmark_limit, flags.deterministic, allow_tf32=False)

    def is_available(self) -> bool:
        """See Platform."""
        return torch.cuda.is_available()

    def memory(self) -> tuple[int, int]:
        """See Platform."""
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)

    def unused_bytes(self) -> int:
        """See Platform."""
        return self.memory()[0]

    def reserved_bytes(self) -> int:
        """What PyTorch holds in this process."""
        return torch.cuda.memory_reserved()

    def allocated_bytes(self) -> int:
        """See Platform."""
        return torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """See Platform."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """See Platform."""
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        """See Platform."""
        torch.cuda.empty_cache()

    def reserve(self, sizes: Iterable[int]) -> int:
        """See segments.py."""
        return segments.take(sizes, self.name)

    def synchronize(self) -> None:
        """See Platform."""
        torch.cuda.synchronize()

    def event(self, *, timing: bool = False) -> Event:
        """See Platform."""
        return torch.cuda.Event(enable_timing=timing)

    def uploader(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """See Uploader."""
        return Uploader(device)

    def rank_environment(self, rank: int, environment: Mapping[str, str]) -> dict[str, str]:
        """See Platform."""
        if env.ONE_GPU():
            return {}
        visible = DRIVER.seen(environment)
        return DRIVER.seeing([visible[rank] if visible else str(rank)])

    def peer_memory(self) -> PeerMemory | None:
        """See Platform; kernels that write there are Triton's."""
        if not self.has_triton:
            return None
        try:
            return CudaPeers()
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the driver's library cannot be used: {error}") from error

    def kernel_facts(self, device: torch.device) -> KernelFacts:
        """See Platform."""
        known = self._facts.get(device)
        if known is None:
            # Torch's stubs name the field of shared memory from 2.15 on; the object has had it before.
            found: Any = torch.cuda.get_device_properties(device)
            hopper = (found.major, found.minor) >= _HOPPER
            known = self._facts[device] = KernelFacts(
                multiprocessors=found.multi_processor_count,
                side_by_side=found.multi_processor_count,
                shared_bytes=found.shared_memory_per_block_optin,
                copies_tiles=hopper,
                early_launch=hopper,
                warpgroup_products=(found.major, found.minor) == _HOPPER,
            )
        return known

    def out_of_memory_count(self) -> int:
        """See Platform."""
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.memory_stats().get("num_ooms", 0))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See Platform."""
        return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)

    def fault(self, error: Exception, device: torch.device) -> str | None:
        """See Platform.

        After an illegal access, every later call on the device fails, or worse, gives what nobody computed.
        """
        said = str(error)
        if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY in said:
            return None
        of_device = isinstance(error, torch.AcceleratorError) or any(words in said for words in _DEVICE_SAYS)
        if of_device and not any(words in said for words in _NOT_LAUNCHED):
            return said
        if device.type == self.name:
            try:
                torch.cuda.synchronize(device)
                if of_device and not _computes(device):
                    return said
            except RuntimeError as second:
                return str(second)
        return None

    def unavailable(self) -> tuple[str, str]:
        """See Platform."""
        return "This machine has no usable NVIDIA GPU.", "Leave `device` out to use the CPU."

    def describe(self) -> str:
        """Its name and memory."""
        free, total = self.memory()
        return f"{torch.cuda.get_device_name()}, {total / 2**30:.0f} GiB, {free / 2**30:.0f} GiB free"


def _computes(device: torch.device) -> bool:
    return int(torch.arange(4, device=device).sum()) == 6


class Uploader:
    """Copies host tensors to one GPU while a step runs there: only what uses them waits for them.

    A copy from ordinary memory makes the host wait until the device has done all that was launched before. So content
    goes through pinned memory and a stream of its own, which the computing stream then waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, host: Tensor) -> Tensor:
        """The same on the device."""
        if host.device == self._device:
            return host
        with torch.cuda.stream(self._stream):
            # The pinned copy may be dropped at once: its memory is used again only when the copy from it is over.
            moved = host.pin_memory().to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        # Allocated on one stream and used on another: the memory must not be given away in between.
        moved.record_stream(current)
        return moved


class CudaGraphs:
    """CUDA graphs; see Graphs.

    `torch.cuda.graph` is not used: it gives all cached memory back to the driver and takes it anew for each graph.
    """

    def new_pool(self) -> Any:
        """See Graphs."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        """See Graphs."""
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See Graphs."""
        return torch.cuda.stream(stream)

    @contextmanager
    def recording(self, pool: Any, *, relaxed: bool) -> Iterator[Graph]:
        """See Graphs; an error in the block is the one that is raised."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            graph.capture_begin(pool=pool, capture_error_mode="relaxed" if relaxed else "thread_local")
            yield graph
        except BaseException:
            with suppress(RuntimeError), warnings.catch_warnings():
                # That nothing was captured, where the first operation was the one that failed.
                warnings.simplefilter("ignore")
                graph.capture_end()
            _end_recording(graph, pool)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _end_recording(graph, pool)
            raise

    @contextmanager
    def refusing_to_wait(self) -> Iterator[None]:
        """See Graphs."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # That not all that waits is found.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def waited(self, error: RuntimeError) -> bool:
        """See Graphs."""
        return _WAITED in str(error)


def _end_recording(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Keep the allocator from waiting for the end of a capture that failed.

    Up to torch 2.11 it waits for the life of the process: memory that more than one stream used is then never given
    out again. (Later versions end the recording with the capture, even a failed one, and raise here.) The allocator of
    pinned memory cannot be reached from here; from then on it refuses the same pool, and asks the graph for its
    streams, which is why the graph is kept.
    """
    graph.reset()
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return
    torch._C._cuda_releasePool(device, pool)
    _abandoned.append(graph)
