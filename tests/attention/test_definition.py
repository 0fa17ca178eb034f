"""What trials of kernels are compared with is attention as PyTorch computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from beheld.attention.definition import defined


def test_equals_pytorch() -> None:
    """Of queries behind a prefix, with heads that share keys."""
    generator = torch.Generator().manual_seed(0)
    q_THC = torch.randn(7, 4, 16, generator=generator)
    k_SKC, v_SKC = torch.randn(2, 10, 2, 16, generator=generator)
    seen_TS = torch.arange(10) <= torch.arange(3, 10)[:, None]
    heads_first = (x.transpose(0, 1)[None] for x in (q_THC, k_SKC, v_SKC))
    want = F.scaled_dot_product_attention(*heads_first, attn_mask=seen_TS, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(defined(q_THC, k_SKC, v_SKC, seen_TS, 0.25), want[0].transpose(0, 1))
    assert not torch.allclose(defined(q_THC, k_SKC, v_SKC, seen_TS, 0.25, 2.0), want[0].transpose(0, 1))
