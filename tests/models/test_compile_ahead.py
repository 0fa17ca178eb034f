"""Functions that are compiled while a model's class is imported, and threads that are chosen before it is prepared."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld import LLM
from beheld.attention import cpu_prefill
from beheld.core.config import KVGroup
from beheld.core.errors import ModelError
from beheld.models import compile_ahead, load, registry
from beheld.platform import host, jit
from beheld.platform.registry import CPU
from beheld.quant import byte_products
from tests import tiny

compiles = pytest.mark.skipif(not jit.available() or host.byte_products() is None, reason="needs llvmlite and vectors")


def config(**options: Any) -> Any:
    given = {"device": "cpu", "dtype": "float32", "quantization": None, "load_format": "auto", "enforce_eager": False}
    made = given | options
    return SimpleNamespace(**({"kv_dtype": made["dtype"]} | made))


def test_threads_that_want_a_module_at_once_compile_it_once() -> None:
    calls: list[int] = []

    @jit.made_once
    def make(number: int) -> Any:
        calls.append(number)
        time.sleep(0.02)
        return SimpleNamespace(number=number)

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(make(7))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [7]
    assert all(each is found[0] for each in found)
    assert make(8).number == 8


@compiles
def test_what_a_rounded_model_wants_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = compile_ahead.begin(config(quantization="int4"))
    assert thread is not None
    thread.join()

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jit, "CompiledModule", refuse)
    products = host.byte_products()
    assert products is not None
    byte_products.compiled(products, "f32")
    byte_products.compiled_rounding(products.lanes, "f32")


@pytest.mark.skipif(not jit.available() or not CPU.bfloat16_products, reason="needs llvmlite and bfloat16")
def test_attention_of_prompts_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    group = KVGroup("full", (0,), 2, 64, 64)
    thread = compile_ahead.begin(config(dtype="bfloat16"), [group])
    assert thread is not None
    thread.join()

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jit, "CompiledModule", refuse)
    assert cpu_prefill.compiles(64)


@compiles
def test_nothing_is_compiled_for_what_does_not_want_it() -> None:
    assert compile_ahead.begin(config()) is None
    assert compile_ahead.begin(config(dtype="float16", quantization="int8")) is None


@compiles
def test_an_llvm_that_refuses_is_left_to_who_wants_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(*given: Any) -> None:
        asked.append("asked")
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(byte_products, "compiled", refuse)
    thread = compile_ahead.begin(config(quantization="int8", enforce_eager=True))
    assert thread is not None
    thread.join()
    assert asked == ["asked"]


def test_a_small_model_is_prepared_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads its trials took five times as long on a busy machine."""
    seen: list[int] = []

    def build(*_: Any) -> None:
        seen.append(torch.get_num_threads())
        raise ModelError("That is all.", "")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(registry, "build", build)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ModelError, match="That is all"):
            LLM(str(tiny.checkpoint("llava")), media_workers=0)
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_a_large_weight_is_checked_piece_by_piece() -> None:
    """As a whole it would be in memory all at once: a vocabulary's embeddings are a third of a small model."""
    read: list[tuple[int, int]] = []
    pages: Any = SimpleNamespace(read=lambda address, size: read.append((address, size)))
    values = torch.zeros(3 * load._PIECE + 5)
    values[load._PIECE + 1] = -7.0
    assert float(load._greatest(values, pages)) == 7.0
    assert sum(size for _, size in read) == values.nbytes
    assert max(size for _, size in read) <= 4 * load._PIECE
