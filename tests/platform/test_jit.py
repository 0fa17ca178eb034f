"""Compiled functions share PyTorch's own threads."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from beheld.attention import cpu_decode, cpu_prefill, cpu_windows
from beheld.platform import host, jit
from beheld.platform.host import ByteProducts
from beheld.quant import byte_products


def test_threads_are_those_of_pytorch_whatever_else_is_loaded() -> None:
    """Another package's OpenMP has threads of its own, which keep the processors from PyTorch's."""
    pytest.importorskip("sentencepiece")
    library = jit._openmp()
    if library is None:
        pytest.skip("PyTorch has no OpenMP with GNU's names")
    before = torch.get_num_threads()
    try:
        for count in (2, 1, 3):
            torch.set_num_threads(count)
            assert library.omp_get_max_threads() == count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("error", [ImportError("no libstdc++"), OSError("no libllvmlite.so")], ids=repr)
def test_an_llvm_that_cannot_be_loaded_is_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llvmlite")

    def refuse(name: str) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", refuse)
        jit.available.cache_clear()
        assert not jit.available()
    jit.available.cache_clear()
    assert str(error) in caplog.text


# With the threads that `torch.set_num_threads` asks for, and more parts than one thread would do.
_SHARED = """
import torch
from beheld.attention import cpu_decode
from beheld.attention.backend import LayerKV
from beheld.platform.jit import Program
from beheld.quant.grouped import rounded
from beheld.quant.grouped_linear import GroupedLinear

torch.manual_seed(0)
linear = GroupedLinear(rounded(torch.randn(512, 1024), 8, 64), None, torch.float32)
x, wanted = torch.randn(64, 1024), linear.numbers.dequantized()
kv = LayerKV(torch.randn(9, 16, 2, 64), torch.randn(9, 16, 2, 64), 0)
tables = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
q = torch.randn(2, 8, 64)
assert cpu_decode.attends(q, kv, 16)
found = []
for threads in (1, 4):
    torch.set_num_threads(threads)
    # What a missing share would leave.
    spoiled = [torch.full((64, 512), float("nan")) for _ in range(8)]
    del spoiled
    y, work = torch.full((64, 512), float("nan")), torch.empty(linear.work_bytes(64), dtype=torch.uint8)
    _, steps = linear.steps(x.data_ptr(), "f32", y.data_ptr(), work.data_ptr(), 64)
    Program(tuple(steps)).run(64, threads)
    words = cpu_decode.SequenceWords(tables, [(0, 64), (0, 63)], 16)
    found.append((linear(x), y, cpu_decode.attend(q, kv, words, 0.125)))
assert all(torch.equal(one, other) for one, other in zip(*found)), [each.isnan().sum() for each in found[1]]
assert (found[1][0] - x @ wanted.t()).norm() < 0.02 * found[1][0].norm()
"""


@pytest.mark.skipif(not jit.available() or host.byte_products() is None, reason="needs llvmlite and a CPU with vectors")
@pytest.mark.parametrize(
    "limit", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "3"}, {"OMP_DYNAMIC": "true"}], ids=str
)
def test_all_is_computed_by_fewer_threads_than_asked_for(limit: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHARED], env={**os.environ, **limit}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not jit.available() or host.byte_products() is None, reason="needs llvmlite and a CPU with vectors")
def test_what_is_compiled_does_not_depend_on_what_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer without a compiler, or for another processor, is not kept: tests ask for one after the other."""
    q_THC = torch.zeros(2, 2, 48)
    wide = host.byte_products() == ByteProducts(16, vnni=True, bfloat16=True)

    def asked() -> list[bool]:
        return [
            cpu_windows.attends(q_THC, q_THC, q_THC, 2),
            cpu_decode.has_steps(48, None, q_THC.device),
            byte_products.rounds(4096, torch.float32),
            cpu_prefill.compiles(48),
        ]

    with monkeypatch.context() as without:
        without.setattr(jit, "available", lambda: False)
        assert asked()[:3] == [False] * 3
    with monkeypatch.context() as other:
        other.setattr(host, "cpu_flags", lambda: "")
        assert asked() == [False] * 4
    assert asked() == [True, True, True, wide]
