"""Packed windows computed together equal each window alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from beheld.attention.tower import tower_attention


@pytest.mark.parametrize("lengths", [[16, 16, 16], [4, 16, 9], [1], [64, 1, 1, 1, 1, 1, 2, 1], [3, 5], [*range(1, 11)]])
def test_equals_each_window_alone(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, sum(lengths), 8, generator=generator) for _ in range(3))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out, _ = tower_attention(None, q, k, v, None, 0.3, cu_seq_lens_q=cu)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], scale=0.3)
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2), atol=1e-6, rtol=1e-5)
        first += length
