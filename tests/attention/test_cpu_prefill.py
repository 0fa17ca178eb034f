"""Attention of prompts in two calls on a CPU, against PyTorch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.attention import cpu_prefill
from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.torch_ref import TorchBackend
from beheld.models.surgery.vector_linear import can_multiply

pytestmark = pytest.mark.skipif(not can_multiply(), reason="needs a CPU that multiplies bfloat16, and llvmlite")
_BLOCK, _KEY_HEADS = 8, 2


class _Prompt:
    """A sequence's queries, keys and values, which lie anywhere in a cache whose other numbers are NaN."""

    def __init__(self, length: int, size: int, group: int) -> None:
        torch.manual_seed(length)
        blocks = -(-length // _BLOCK)
        self.table_1N = (torch.randperm(blocks)[None] + 1).int()
        self.q, self.k, self.v = (
            torch.randn(length, heads, size).bfloat16() for heads in (_KEY_HEADS * group, _KEY_HEADS, _KEY_HEADS)
        )
        cache = (blocks + 1, _BLOCK, _KEY_HEADS, size)
        blank = torch.full(cache, float("nan"), dtype=torch.bfloat16)
        self.kv = LayerKV(blank, blank.clone(), 0)

    def step(self, start: int, stop: int, **options: Any) -> Tensor:
        """Attend with the positions from start to stop as a step's tokens."""
        positions = torch.arange(start, stop)
        slots_T = self.table_1N[0].long()[positions // _BLOCK] * _BLOCK + positions % _BLOCK
        ahead = options.pop("both_ways", ())
        group = GroupMetadata(slots_T, self.table_1N, options.pop("window", None), chunk=options.pop("chunk", None))
        counts = torch.tensor([0, stop - start], dtype=torch.int32)
        metadata = AttnMetadata(
            0, (start,), (stop,), torch.tensor([stop]), counts, (group,), block_size=_BLOCK, both_ways=ahead
        )
        backend, own = TorchBackend(), slice(start, stop)
        backend.begin(metadata)
        return backend.attend(self.q[own], self.k[own], self.v[own], self.kv, metadata, 0.2, None)

    def wanted(self, window: int | None = None, chunk: int | None = None) -> Tensor:
        """The exact result of all queries."""
        group, count = self.q.shape[1] // _KEY_HEADS, len(self.q)
        k, v = (each.double().repeat_interleave(group, 1) for each in (self.k, self.v))
        query, key = torch.arange(count)[:, None], torch.arange(count)[None]
        hidden = (key > query) | (key <= query - (window or count))
        if chunk is not None:
            hidden |= key < query // chunk * chunk
        scores = torch.einsum("phc,lhc->hpl", self.q.double(), k) * 0.2
        return torch.einsum("hpl,lhc->phc", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries of calls of the compiled attention."""
    calls: list[int] = []
    plain = cpu_prefill.attend

    def noted(q_PHC: Tensor, *given: Any) -> None:
        calls.append(len(q_PHC))
        plain(q_PHC, *given)

    monkeypatch.setattr(cpu_prefill, "attend", noted)
    return calls


# Parts of one tile and of several, with rests of a block and of a pair; one head of keys' queries and several.
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 4), (80, 3)])
@pytest.mark.parametrize("length", [1, 15, 33, 130])
@pytest.mark.parametrize("seen", [{}, {"window": 21}, {"window": 48, "chunk": 48}])
def test_is_near_the_exact_result(
    length: int, size: int, group: int, seen: dict[str, int], compiled: list[int]
) -> None:
    prompt = _Prompt(length, size, group)
    found, wanted = prompt.step(0, length, **seen), prompt.wanted(**seen)
    assert compiled == [length]
    # Shares and results are rounded to 8 bits.
    assert (found.double() - wanted).norm() <= 2.0**-8 * wanted.norm()
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("seen", [{}, {"window": 40}])
def test_has_the_same_bits_however_a_prompt_is_cut(seen: dict[str, int], compiled: list[int]) -> None:
    prompt = _Prompt(150, 32, 2)
    whole = prompt.step(0, 150, **seen)
    cut = [prompt.step(start, stop, **seen) for start, stop in ((0, 37), (37, 38), (38, 150))]
    assert torch.equal(torch.cat(cut), whole)
    assert compiled == [150, 37, 1, 112]


def test_threads_share_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_prefill, "_FEW_PRODUCTS", 0)
    prompt, before, found = _Prompt(200, 16, 2), torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(prompt.step(0, 200))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_broken_keys_are_not_hidden() -> None:
    prompt = _Prompt(40, 16, 1)
    prompt.k[3] = float("nan")
    found = prompt.step(0, 40)
    assert found[3:].isnan().all()
    assert not found[:3].isnan().any()


def test_positions_that_a_window_gave_back_are_not_read(compiled: list[int]) -> None:
    prompt = _Prompt(90, 32, 2)
    whole = prompt.step(0, 90, window=30)
    # The first query sees from 31 on: its block of 16 positions begins before, in the middle of a pair.
    places = prompt.table_1N[0, torch.arange(31) // _BLOCK].long(), torch.arange(31) % _BLOCK
    for numbers in (prompt.kv.keys, prompt.kv.values):
        numbers[places] = float("nan")
    assert torch.equal(prompt.step(60, 90, window=30), whole[60:])
    assert compiled == [90, 30]


def test_queries_that_look_ahead_are_left_to_pytorch(compiled: list[int]) -> None:
    prompt = _Prompt(20, 16, 1)
    prompt.step(0, 20, both_ways=(((4, 9),),))
    assert not compiled
    assert not cpu_prefill.attends(prompt.q.float(), prompt.kv, _BLOCK)


def test_a_step_after_others_is_near_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's two ways: each query's first and last position, and a mask."""
    prompt = _Prompt(90, 32, 2)
    options: dict[str, int] = {"window": 32, "chunk": 32}
    prompt.step(0, 60, **options)
    found = prompt.step(60, 90, **options)
    monkeypatch.setattr(cpu_prefill, "attends", lambda *_: False)
    torch.testing.assert_close(found, prompt.step(60, 90, **options), rtol=2.0**-6, atol=2.0**-6)
