"""Attention within windows in one call on a CPU, against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from beheld.attention import cpu_windows
from beheld.attention.tower import tower_attention
from beheld.platform import host, jit

pytestmark = pytest.mark.skipif(
    not jit.available() or host.byte_products() is None, reason="needs llvmlite, and a CPU with vectors"
)
_SCALE = 0.3


def _given(lengths: list[int], heads: int, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values (T, H, C) that lie in one tensor, as joined products give them, and the bounds."""
    made = torch.randn(sum(lengths), 3 * heads * size, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [x.unflatten(1, (heads, size)) for x in made.chunk(3, dim=1)], torch.tensor([0, *lengths]).cumsum(0)


def _exact(qkv: list[Tensor], lengths: list[int]) -> Tensor:
    found = []
    for q, k, v in zip(*(x.double().split(lengths) for x in qkv), strict=True):
        shares = (torch.einsum("qhc,khc->hqk", q, k) * _SCALE).softmax(-1)
        found.append(torch.einsum("hqk,khc->qhc", shares, v))
    return torch.cat(found)


# Lengths around a vector of 16, a tile of 8 rows and a part of 32; an empty window; few windows and many.
@pytest.mark.parametrize("lengths", [[1], [15, 16, 17], [7, 0, 33, 2], [130], [*range(1, 40)]])
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (3, 32), (2, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_near_the_exact_result(lengths: list[int], heads: int, size: int, dtype: torch.dtype) -> None:
    (q, k, v), bounds = _given(lengths, heads, size, dtype)
    assert cpu_windows.attends(q, k, v, max(lengths))
    found = cpu_windows.attend(q, k, v, bounds, max(lengths), _SCALE)
    # bfloat16: the result's own rounding.
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), _exact([q, k, v], lengths), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_has_the_same_bits_alone_and_among_others_for_any_number_of_threads(dtype: torch.dtype) -> None:
    lengths = [40, 9, 1, 100, 33, 64, 70]
    (q, k, v), bounds = _given(lengths, 6, 64, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = cpu_windows.attend(q, k, v, bounds, max(lengths), _SCALE).split(lengths)
    finally:
        torch.set_num_threads(before)
    for length, own, *parts in zip(lengths, together, *(x.split(lengths) for x in (q, k, v)), strict=True):
        alone = cpu_windows.attend(parts[0], parts[1], parts[2], torch.tensor([0, length]), length, _SCALE)
        assert torch.equal(own, alone), length


def test_what_is_no_number_stays_in_its_window_and_is_seen() -> None:
    lengths = [20, 20, 20]
    (q, k, v), bounds = _given(lengths, 2, 32, torch.float32)
    k[25, 1, 3] = float("nan")
    found = cpu_windows.attend(q, k, v, bounds, 20, _SCALE)
    broken = found.isnan().any(-1)
    assert broken[20:40, 1].all()
    assert int(broken.sum()) == 20


def test_towers_use_it_and_others_what_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = cpu_windows.attend

    def noted(q_THC: Tensor, *given: object) -> Tensor:
        calls.append(q_THC.shape[2])
        return plain(q_THC, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_windows, "attend", noted)
    for size, dtype in ((32, torch.float32), (24, torch.float32), (32, torch.float16)):
        (q, k, v), bounds = _given([5, 30], 2, size, dtype)
        inputs = (x.transpose(0, 1)[None] for x in (q, k, v))
        found, _ = tower_attention(None, next(inputs), next(inputs), next(inputs), None, _SCALE, cu_seq_lens_q=bounds)
        tolerance = 2e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(found[0].double(), _exact([q, k, v], [5, 30]), atol=tolerance, rtol=tolerance)
    assert calls == [32]
