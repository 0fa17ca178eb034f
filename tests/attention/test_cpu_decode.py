"""Attention of decoding sequences in one call on a CPU, against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention import cpu_decode
from beheld.attention.backend import Further, LayerKV
from beheld.platform import host, jit

pytestmark = pytest.mark.skipif(
    not jit.available() or host.byte_products() is None, reason="needs llvmlite and a CPU with vectors"
)
_BLOCK, _KEY_HEADS = 16, 2


def _case(dtype: torch.dtype, size: int, group: int, stops: list[int]) -> tuple[Tensor, LayerKV, Tensor]:
    blocks = [-(-stop // _BLOCK) for stop in stops]
    tables_BN = torch.zeros(len(stops), max(blocks), dtype=torch.int32)
    ids = (torch.randperm(sum(blocks)) + 1).int()
    for row, own in zip(tables_BN, ids.split(blocks), strict=True):
        row[: len(own)] = own
    cache = (sum(blocks) + 1, _BLOCK, _KEY_HEADS, size)
    # What no sequence holds must not be read into an answer.
    keys, values = (torch.full(cache, float("nan"), dtype=dtype) for _ in range(2))
    for stop, own in zip(stops, ids.split(blocks), strict=True):
        for each in (keys, values):
            flat = each[own.long()].flatten(0, 1)
            flat[:stop] = torch.randn(stop, _KEY_HEADS, size).to(dtype)
            each[own.long()] = flat.view(-1, *cache[1:])
    return torch.randn(len(stops), _KEY_HEADS * group, size).to(dtype), LayerKV(keys, values, 0), tables_BN


def _wanted(q_BHC: Tensor, kv: LayerKV, tables_BN: Tensor, seen: list[tuple[int, int]]) -> Tensor:
    rows = []
    for q_HC, table, (first, stop) in zip(q_BHC, tables_BN.long(), seen, strict=True):
        k_HLC, v_HLC = (
            each[table].flatten(0, 1)[first:stop].float().repeat_interleave(len(q_HC) // _KEY_HEADS, 1).transpose(0, 1)
            for each in (kv.keys, kv.values)
        )
        rows.append(F.scaled_dot_product_attention(q_HC.float()[:, None], k_HLC, v_HLC, scale=0.3)[:, 0])
    return torch.stack(rows)


def _words(tables_BN: Tensor, seen_BL: list[tuple[int, int]]) -> cpu_decode.SequenceWords:
    return cpu_decode.SequenceWords(tables_BN, seen_BL, _BLOCK)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 3), (256, 2)])
def test_attends_as_pytorch_does(dtype: torch.dtype, off: float, size: int, group: int) -> None:
    torch.manual_seed(0)
    stops = [1, 15, 16, 33, 100]
    q_BHC, kv, tables_BN = _case(dtype, size, group, stops)
    assert cpu_decode.attends(q_BHC, kv, _BLOCK)
    for window in (1000, 20):
        seen = [(max(0, stop - window), stop) for stop in stops]
        found = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.3)
        torch.testing.assert_close(found.float(), _wanted(q_BHC, kv, tables_BN, seen), rtol=off, atol=off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("biased", "beside"), [(True, ""), (False, "sinks"), (True, "sinks"), (True, "further")])
@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 3)])
def test_scores_are_joined_with_what_stands_beside(
    dtype: torch.dtype, biased: bool, beside: str, size: int, group: int
) -> None:
    torch.manual_seed(2)
    seen = [(0, 1), (0, 16), (13, 33), (0, 100)]
    q_BHC, kv, tables_BN = _case(dtype, size, group, [stop for _, stop in seen])
    heads = q_BHC.shape[1]
    # Farther keys than 23 positions have the last bias.
    bias_HD = torch.randn(heads, 24) if biased else None
    sinks_H = torch.randn(heads) if beside == "sinks" else None
    further = None
    if beside == "further":
        further = Further(torch.randn(len(seen), heads), torch.randn_like(q_BHC))
        # One sequence has nothing else to attend to.
        further.sums_TH[1], further.values_THC[1] = float("-inf"), 0.0
    rows_HL = None if bias_HD is None else cpu_decode.bias_rows(bias_HD, 100)
    found = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.3, rows_HL, sinks_H, further)
    for b, (first, stop) in enumerate(seen):
        k_LHC, v_LHC = (
            each[tables_BN[b].long()].flatten(0, 1)[first:stop].double().repeat_interleave(group, 1)
            for each in (kv.keys, kv.values)
        )
        scores_HL = torch.einsum("hc,lhc->hl", q_BHC[b].double() * 0.3, k_LHC)
        if bias_HD is not None:
            scores_HL += bias_HD[:, (stop - 1 - torch.arange(first, stop)).clamp(max=23)]
        others_H = torch.full((heads,), float("-inf")) if sinks_H is None else sinks_H
        others_HC = torch.zeros(heads, size)
        if further is not None:
            others_H, others_HC = further.sums_TH[b], further.values_THC[b]
        weights_HM = torch.softmax(torch.cat([scores_HL, others_H[:, None].double()], 1), 1)
        wanted_HC = torch.einsum("hl,lhc->hc", weights_HM[:, :-1], v_LHC) + weights_HM[:, -1:] * others_HC.double()
        off = 1e-5 if dtype == torch.float32 else 2.0**-6
        torch.testing.assert_close(found[b].double(), wanted_HC, rtol=off, atol=off)


def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(1)
    seen = [(0, 40), (3, 90), (0, 1), (7, 512)]
    q_BHC, kv, tables_BN = _case(torch.float32, 64, 4, [stop for _, stop in seen])
    together = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.125)
    for b in range(len(seen)):
        own = slice(b, b + 1)
        assert torch.equal(cpu_decode.attend(q_BHC[own], kv, _words(tables_BN[own], seen[own]), 0.125), together[own])


def test_scores_take_memory_for_each_thread_not_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = [512] * 9
    q_BHC, kv, tables_BN = _case(torch.float32, 64, 4, stops)
    made: list[int] = []
    plain = torch.empty

    def counted(size: int) -> Tensor:
        made.append(size)
        return plain(size)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen = [(0, stop) for stop in stops]
        wanted = _wanted(q_BHC, kv, tables_BN, seen)
        monkeypatch.setattr(torch, "empty", counted)
        found = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.3)
    finally:
        torch.set_num_threads(before)
    monkeypatch.undo()
    # Of each query head: its scores, 16 numbers, and sums of 64 values.
    assert [size for size in made if size] == [3 * q_BHC.shape[1] * (512 + 16 + 64)]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_broken_keys_are_not_hidden() -> None:
    q_BHC, kv, tables_BN = _case(torch.float32, 16, 1, [20])
    kv.keys[tables_BN[0, 1].long(), 0] = float("nan")
    assert cpu_decode.attend(q_BHC, kv, _words(tables_BN, [(0, 20)]), 1.0).isnan().all()


def test_other_layers_are_left_to_pytorch() -> None:
    q_BHC, kv, _ = _case(torch.float32, 16, 1, [4])
    assert not cpu_decode.attends(q_BHC, kv, 12)
    assert not cpu_decode.attends(q_BHC.bfloat16(), kv, _BLOCK)
    assert not cpu_decode.attends(q_BHC[..., :8], LayerKV(kv.keys[..., :8], kv.values[..., :8], 0), _BLOCK)


@pytest.mark.parametrize("numbers", [1, 700, 1 << 16])
@pytest.mark.parametrize("threads", [1, 3])
def test_heads_have_the_same_bits_however_many_are_done_at_once(
    numbers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    seen = [(0, 1), (5, 90), (0, 37), (0, 16)]
    q_BHC, kv, tables_BN = _case(torch.float32, 32, 2, [stop for _, stop in seen])
    wanted = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.2)
    # As if a few numbers were worth threads.
    monkeypatch.setattr(cpu_decode, "_FEW_NUMBERS", 0)
    monkeypatch.setattr(cpu_decode, "_NUMBERS_AT_ONCE", numbers)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.2), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_nothing_is_written_beside_the_lines_and_the_result(
    size: int, group: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allocated stands between numbers that must stay, and what is not seen holds NaN."""
    torch.manual_seed(4)
    seen = [(0, 33), (7, 50), (0, 16)]
    q_BHC, kv, tables_BN = _case(torch.float32, size, group, [stop for _, stop in seen])
    read = torch.zeros(kv.keys.shape[:2], dtype=torch.bool)
    for b, (first, stop) in enumerate(seen):
        for position in range(first, stop):
            read[tables_BN[b, position // _BLOCK], position % _BLOCK] = True
    kv.keys[~read], kv.values[~read] = math.nan, math.nan
    before = kv.keys.clone(), kv.values.clone()
    guarded: list[Tensor] = []

    def fenced(size: int) -> Tensor:
        whole = torch.full((size + 128,), 7.0)
        guarded.append(whole)
        return whole[64 : size + 64]

    monkeypatch.setattr(cpu_decode, "_FEW_NUMBERS", 0)
    monkeypatch.setattr(torch, "empty", fenced)
    monkeypatch.setattr(torch, "empty_like", lambda x: fenced(x.numel()).view(x.shape))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cpu_decode.attend(q_BHC, kv, _words(tables_BN, seen), 0.3)
    finally:
        torch.set_num_threads(threads_before)
        monkeypatch.undo()
    torch.testing.assert_close(found, _wanted(q_BHC, kv, tables_BN, seen), rtol=1e-5, atol=1e-5)
    assert len(guarded) == 3
    for whole in guarded:
        assert (whole[:64] == 7.0).all()
        assert (whole[-64:] == 7.0).all()
    for after, was in zip((kv.keys, kv.values), before, strict=True):
        assert torch.equal(after.nan_to_num(9.0), was.nan_to_num(9.0))
