"""Every platform answers the whole protocol; what is chosen, and what a CPU says of its memory."""

from __future__ import annotations

import inspect
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from beheld.core.errors import ConfigError
from beheld.platform import cuda_driver, host, probe
from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda, CudaGraphs
from beheld.platform.nccl import Nccl
from beheld.platform.platform import Collectives, Event, Graphs, Platform
from beheld.platform.registry import CPU, PLATFORMS, choose, platform_of
from beheld.quant.availability import check_at_load
from tests.platform.stand_in import Plain, StandIn


def names(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [Cpu, Cuda, StandIn, Plain])
@pytest.mark.parametrize("name", names(Platform))
def test_every_platform_answers_the_protocol(name: str, kind: type) -> None:
    wanted, found = inspect.getattr_static(Platform, name), inspect.getattr_static(kind(), name)
    if isinstance(wanted, property):
        assert not inspect.isfunction(found), "asked without a call"
    else:
        assert [(p.name, p.kind) for p in inspect.signature(wanted).parameters.values()] == [
            (p.name, p.kind) for p in inspect.signature(found).parameters.values()
        ]


@pytest.mark.parametrize("name", ["hold", "leave", "group"])
def test_nccl_answers_the_protocol_of_collectives(name: str) -> None:
    wanted, found = getattr(Collectives, name), getattr(Nccl, name)
    assert list(inspect.signature(wanted).parameters) == list(inspect.signature(found).parameters)


@pytest.mark.parametrize("name", names(Graphs))
def test_cuda_s_graphs_answer_theirs(name: str) -> None:
    wanted, found = getattr(Graphs, name), getattr(CudaGraphs, name)
    assert list(inspect.signature(wanted).parameters) == list(inspect.signature(found).parameters)


def test_names_are_those_of_the_option() -> None:
    assert tuple(PLATFORMS) == probe.device_names()
    for name, platform in PLATFORMS.items():
        assert platform_of(name) is platform_of(torch.device(name)) is platform_of(torch.device(name, 0)) is platform
        assert platform.device.type == platform.name == name


def test_auto_takes_an_accelerator_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(Cuda, "is_available", lambda cuda, there=there: there)
        assert choose("auto").name == name
        assert choose("cpu") is CPU
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU") as caught:
        choose("cuda")
    assert caught.value.param == "device"
    with pytest.raises(ConfigError, match="no device 'tpu'") as caught:
        choose("tpu")
    assert caught.value.remedy == "Known: 'auto', 'cpu', 'cuda'."


def test_what_is_refused_says_what_the_platform_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remedy for 4 bits names all platforms' ways, for the user may choose another device."""
    monkeypatch.setattr(Cuda, "fp8_products", False)
    monkeypatch.setattr(Cuda, "no_grouped_products", "a reason")
    found = {}
    for name in ("fp8", "int4"):
        with pytest.raises(ConfigError) as caught:
            check_at_load(name, name, platform_of("cuda"), "bfloat16")
        found[name] = caught.value.remedy
    assert found == {
        "fp8": "It needs a GPU of compute capability 8.9 or later, Triton and dtype='bfloat16'. Otherwise leave the "
        "option out, or add device='cpu'.",
        "int4": "On a CPU with AVX2, AVX512-VNNI or AVX-VNNI: pip install llvmlite. On a GPU of compute capability 8.0 "
        "or later: install Triton, and leave BEHELD_INT4_ON_GPU out.",
    }


@pytest.mark.parametrize(
    ("flags", "stored", "chosen"),
    [
        ("avx2", "float16", "float32"),
        ("avx2", "bfloat16", "float32"),
        ("avx2 avx512_bf16", "bfloat16", "bfloat16"),
        ("amx_bf16", "bfloat16", "bfloat16"),
        ("amx_bf16", "float16", "float32"),
        ("", "float32", "float32"),
    ],
)
def test_a_cpu_computes_in_what_it_has(flags: str, stored: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    found, reason = CPU.default_dtype(stored)
    assert found == chosen
    assert (reason is None) == (found == stored)
    assert platform_of("cuda").default_dtype(stored) == (stored, None)


def test_events_of_a_cpu_are_moments() -> None:
    events: list[Event] = [CPU.event(timing=True) for _ in range(2)]
    for event in events:
        event.record()
        assert event.query()
    first, last = events
    assert 0 <= first.elapsed_time(last) < 10_000
    assert first.elapsed_time(last) == -last.elapsed_time(first)


def test_memory_of_a_cpu_is_the_process_s() -> None:
    # Pages of a mapping are new; an allocator might hand out memory that the process has already.
    with mmap.mmap(-1, 64 << 20) as taken:
        before = CPU.reserved_bytes()
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        held = CPU.allocated_bytes() - before
        assert 48 << 20 <= held <= 96 << 20
        assert CPU.peak_bytes() >= before + held
    free, total = CPU.memory()
    assert 0 < free < total
    assert 0 < CPU.unused_bytes() <= total


def group(folder: Path, version: int, limit: int | str) -> Path:
    """A control group of 700 bytes, of which 200 are files that could be given up."""
    if version == 2:
        found = {"memory.max": limit, "memory.current": 700, "memory.stat": "anon 500\ninactive_file 200\n"}
    else:
        (folder / "memory").mkdir()
        names = ("limit_in_bytes", "usage_in_bytes")
        found = {f"memory/memory.{name}": value for name, value in zip(names, (limit, 700), strict=True)}
        found["memory/memory.stat"] = "inactive_file 1\ntotal_inactive_file 200\n"
    for name, value in found.items():
        (folder / name).write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_bounds_memory(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = group(tmp_path, version, 1000)
    assert host.group_memory(root) == (500, 1000)
    monkeypatch.setattr(host, "group_memory", lambda: (500, 1000))
    assert host.memory() == (500, 1000)
    assert host.unused_bytes() == 500


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_below_the_root_bounds_memory(version: int, tmp_path: Path) -> None:
    """As in a service of systemd, or where a group was made by hand: the root itself has no limit."""
    own = tmp_path / "own"
    lines = "9:name=systemd:/a\n4:cpu,memory:/outer/inner\n" if version == 1 else "0::/outer/inner\n"
    own.write_text("not a group\n" + lines)
    assert host.group_memory(tmp_path, own) is None
    groups = tmp_path / "memory" if version == 1 else tmp_path
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for path, limit, used in (("outer/inner", 900, 200), ("outer", 1000, 700)):
        (groups / path).mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, (limit, used), strict=True):
            (groups / path / f"memory.{name}").write_text(f"{value}\n")
    assert host.group_memory(tmp_path, own) == (300, 900)


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_own_group_is_the_root(version: int, tmp_path: Path) -> None:
    """Its path may be that on the host, where no folder is inside."""
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/1\n0::/docker/1\n")
    assert host.group_memory(group(tmp_path, version, 1000), own) == (500, 1000)


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, 9223372036854771712)])
def test_a_group_without_a_limit_bounds_nothing(version: int, limit: int | str, tmp_path: Path) -> None:
    root = group(tmp_path, version, limit)
    found = host.group_memory(root)
    assert found is None or found[1] > 1 << 60


def test_what_is_asked_early_loads_no_torch() -> None:
    code = (
        "import sys\nfrom beheld.platform.probe import has_accelerator, device_words\n"
        "from beheld.platform import host\nhas_accelerator(None), device_words(), host.memory()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_driver_is_an_accelerator_unless_the_cpu_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DRIVERS", (replace(cuda_driver.DRIVER, file=tmp_path / "driver"),))
    assert not probe.has_accelerator(None)
    (tmp_path / "driver").touch()
    assert probe.has_accelerator(None)
    assert probe.has_accelerator("auto")
    assert probe.has_accelerator("cuda")
    assert not probe.has_accelerator("cpu")


def test_a_compiler_sees_through_the_question() -> None:
    """Asked within a compiled layer, it is answered while it is compiled, in one graph and without a warning."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if platform_of(x.device).one_row_kernels else x * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
