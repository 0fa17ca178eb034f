"""A GPU's memory without a GPU: the engine's share, weights that do not fit, and what a lack of memory is told as."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld.checkpoint.info import read_config
from beheld.checkpoint.resolve import resolve
from beheld.core.config import EngineArgs
from beheld.core.errors import CapacityError, ModelError
from beheld.models import out_of_memory, registry
from beheld.models.load import weigh
from beheld.platform import segments
from beheld.platform.cpu import Cpu
from beheld.platform.registry import CPU, platform_of
from beheld.runner import build
from beheld.runner.memory_share import MemoryShare
from tests import tiny
from tests.inputs import pipes

GIB = 1 << 30
FAMILY = "llava"
CUDA = platform_of("cuda")


class Gpu:
    """A GPU as PyTorch would tell of it, of 80 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float = 0) -> None:
        self.total, self.others, self.held, self.driver = 80 * GIB, int(others * GIB), 0, 0
        self.ooms = 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.held)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": self.ooms})

    def info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.others - self.held - self.driver, self.total


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def wants(**changes: Any) -> tuple[Any, Any, Any]:
    """What build_runner is given for a tiny checkpoint on a GPU."""
    args = EngineArgs(model=str(tiny.checkpoint(FAMILY)))
    model = pipes.info(FAMILY)
    return read_config(resolve(args), args), model, pipes.config(model, device="cuda", **changes)


@pytest.mark.parametrize(
    ("others", "fraction", "left"), [(0, 0.45, 29), (36, 0.45, 29), (40, 0.5, 33), (0, 0.9, 65), (20, 0.5, 33)]
)
def test_a_share_is_of_the_whole_gpu_whoever_has_the_rest(gpu: Gpu, others: int, fraction: float, left: int) -> None:
    gpu.others = others * GIB
    share = MemoryShare.of(CUDA, fraction)
    share.check()
    gpu.held = 7 * GIB
    assert share.left_bytes() == left * GIB


def test_what_the_driver_takes_counts_and_what_others_give_back_does_not(gpu: Gpu) -> None:
    gpu.others = 30 * GIB
    share = MemoryShare.of(CUDA, 0.5)
    gpu.held, gpu.driver = 7 * GIB, 1 * GIB
    assert share.left_bytes() == 32 * GIB
    gpu.others = 0
    assert share.left_bytes() == 33 * GIB
    # What others take meanwhile cannot be told from what the driver takes for this engine.
    gpu.others = 60 * GIB
    assert share.left_bytes() == 2 * GIB
    gpu.others = 80 * GIB - gpu.held - gpu.driver
    assert share.left_bytes() == 0


def test_an_engine_before_this_one_in_the_same_process_is_another(gpu: Gpu) -> None:
    gpu.held = 36 * GIB
    share = MemoryShare.of(CUDA, 0.45)
    share.check()
    gpu.held += 6 * GIB
    assert share.left_bytes() == 30 * GIB


def test_a_share_that_is_not_free_is_refused_with_both_numbers(gpu: Gpu) -> None:
    gpu.others = 20 * GIB
    with pytest.raises(CapacityError) as caught:
        MemoryShare.of(CUDA, 0.9).check()
    said = str(caught.value)
    assert "72.00 GiB" in said
    assert "60.00 GiB are free" in said
    assert "at most 0.75" in said
    assert caught.value.param == "gpu_memory_utilization"
    MemoryShare.of(CUDA, 0.75).check()
    gpu.others = 80 * GIB
    with pytest.raises(CapacityError, match=r"the rest\. End what else uses the GPU"):
        MemoryShare.of(CUDA, 0.9).check()


def test_the_share_is_checked_before_anything_is_loaded_unless_the_cache_has_a_size(gpu: Gpu) -> None:
    gpu.others = 60 * GIB
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.9"):
        build.build_runner(*wants(load_format="dummy"), shrink=False)
    assert build._begin(*wants(load_format="dummy", kv_cache_bytes=GIB)) is not None


def test_weights_are_compared_with_memory_before_they_are_read(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(registry, "build", load)
    needed = weigh(*wants()).num_bytes
    gpu.total = needed - 1
    with pytest.raises(CapacityError) as caught:
        build.build_runner(*wants(memory_fraction=1.0), shrink=False)
    assert str(caught.value).count(out_of_memory.gib(needed)) >= 1
    assert "smaller checkpoint" in caught.value.remedy
    gpu.total = 2 * needed
    with pytest.raises(CapacityError) as caught:
        build.build_runner(*wants(memory_fraction=0.4), shrink=False)
    assert caught.value.remedy == "Raise gpu_memory_utilization."


def test_weights_that_are_read_again_need_no_more_than_their_own_memory(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer holds the rest until it lets the cache come back."""

    def built(*given: Any) -> Any:
        return "read"

    monkeypatch.setattr(registry, "build", built)
    monkeypatch.setattr(type(CUDA), "reserve", lambda platform, sizes: None)
    gpu.others = 40 * GIB
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.9"):
        build.load(*wants(memory_fraction=0.9))
    assert build.load(*wants(memory_fraction=0.9), again=True)[0] == "read"
    gpu.others = gpu.total - weigh(*wants()).num_bytes + 1
    with pytest.raises(CapacityError, match="The weights of"):
        build.load(*wants(memory_fraction=0.9), again=True)


def test_a_host_without_memory_is_told_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hf_config, model, _ = wants()
    monkeypatch.setattr(Cpu, "memory", lambda cpu: (1000, 2000))
    with pytest.raises(CapacityError, match="set dtype='bfloat16'"):
        build.build_runner(hf_config, model, pipes.config(model), shrink=False)
    build._begin(hf_config, model, pipes.config(model, dtype="bfloat16"))
    assert "may be very slow" in caplog.text
    monkeypatch.undo()
    free, total = CPU.memory()
    assert 0 < free < total


def oom(*given: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 23.6 GiB of which 0.9 is free."
    )


@pytest.mark.parametrize("stage", ["load", "prepare"])
def test_a_lack_of_memory_names_stage_sizes_and_remedy(stage: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from beheld.models import load
    from beheld.models.surgery import operations

    gpu.others = 79 * GIB
    if stage == "load":
        monkeypatch.setattr(load, "_from_files", oom)
    else:
        loaded = SimpleNamespace(target=SimpleNamespace(shards=None), perform=oom)
        monkeypatch.setattr(load, "load_model", lambda *given: loaded)
        monkeypatch.setattr(operations, "operations_of", oom)
    with pytest.raises(CapacityError) as caught:
        registry.build(*wants())
    said = str(caught.value)
    assert ("load the weights" in said) == (stage == "load")
    assert "1.16 GiB more could not be had" in said
    assert "1.00 GiB of 80.00 GiB were free on the GPU" in said
    assert "smaller checkpoint" in said


@pytest.mark.parametrize("hidden", [False, True])
def test_the_loader_does_not_blame_the_checkpoint(hidden: bool, gpu: Gpu) -> None:
    """transformers notes what fails for a single weight, and what it raises in the end does not name it."""
    from beheld.models import load

    class Loading:
        @classmethod
        def from_pretrained(cls, *given: Any, **options: Any) -> Any:
            if hidden:
                gpu.ooms += 1
                raise RuntimeError("We encountered some issues during automatic conversion of the weights.")
            oom()

    hf_config, model, config = wants(show_progress=False)
    with pytest.raises(CapacityError), out_of_memory.explained("load the weights", CUDA, "Take a smaller one."):
        load._from_files(Loading, hf_config, model, torch.float32, config, None, None)
    hidden_before = gpu.ooms

    class Broken:
        @classmethod
        def from_pretrained(cls, *given: Any, **options: Any) -> Any:
            raise RuntimeError("truncated")

    with pytest.raises(ModelError, match="Fetch the checkpoint again"):
        load._from_files(Broken, hf_config, model, torch.float32, config, None, None)
    assert gpu.ooms == hidden_before


@pytest.mark.parametrize(
    ("error", "piece"),
    [
        (MemoryError("Unable to allocate 3.5 GiB for an array"), None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), "4096 bytes"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
    ],
)
def test_every_library_is_understood(error: Exception, piece: str | None) -> None:
    with pytest.raises(CapacityError) as caught, out_of_memory.explained("think", CPU, "Do less.", 3 * GIB):
        raise error
    said = str(caught.value)
    assert "to think: it takes about 3.00 GiB in all; " in said
    assert piece is None or f"{piece} more could not be had" in said
    assert "were free on this machine. Do less." in said


def test_other_errors_stay_what_they_are() -> None:
    for error in (ValueError("no"), ModelError("out of memory, says the model")):
        with pytest.raises(type(error)) as caught, out_of_memory.explained("think", CPU, "Do less."):
            raise error
        assert caught.value is error


def test_what_failed_is_let_go() -> None:
    class Large:
        pass

    def fail() -> None:
        large = Large()
        assert sys.getrefcount(large) == 2
        raise MemoryError

    with pytest.raises(CapacityError) as caught, out_of_memory.explained("think", CPU, "Do less."):
        fail()
    frames = []
    trace = caught.value.__cause__.__traceback__ if caught.value.__cause__ else None
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    assert frames[-1].f_code.co_name == "fail"
    assert not frames[-1].f_locals


def test_room_is_taken_by_weight_and_then_transformers_takes_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `segments` relies on: transformers' loader asks for no piece where so much is held unused."""
    from transformers import LlavaForConditionalGeneration, modeling_utils

    taken: list[int] = []
    empty = torch.empty

    def counted(size: int, *, dtype: torch.dtype, device: Any, **more: Any) -> torch.Tensor:
        taken.append(size * dtype.itemsize)
        return empty(1, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", counted)
    mib = 1 << 20
    assert segments.take([100 * mib, 4 * mib, 12 * mib, 17 * mib + 1, 3000, 9 * mib], "cuda") == sum(taken)
    assert sorted(taken) == [12 * mib, 17 * mib + 1, 20 * mib, 100 * mib]
    monkeypatch.setattr(torch, "empty", empty)

    # transformers spares itself the last gigabyte and a half: the sizes must be those of a large model.
    monkeypatch.setattr(modeling_utils, "get_total_byte_count", lambda *given: {torch.device("cuda:0"): 10 * GIB})
    monkeypatch.setattr(torch, "empty", counted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for held, asked in ((0, 10 * GIB), (10 * GIB, 0)):
        gpu.held = held
        taken.clear()
        modeling_utils.caching_allocator_warmup(LlavaForConditionalGeneration, {"weight": "cuda:0"}, None)
        assert taken == [asked]
