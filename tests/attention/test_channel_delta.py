"""Kimi's delta attention in chunks is that token by token, whatever the length and the state before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from beheld.attention.channel_delta import ChannelDelta

HEADS, KEY, VALUE = 3, 8, 6
RULE = ChannelDelta(HEADS, KEY, VALUE)


def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, decays of channels (some near 1, some near 0) and rates of writing."""
    made = torch.Generator().manual_seed(1)
    x_TC = torch.randn(count, HEADS * (2 * KEY + VALUE), generator=made)
    g_THK = -torch.rand(count, HEADS, KEY, generator=made).pow(4) * 8
    return x_TC, g_THK, torch.rand(count, HEADS, generator=made)


def by_hand(state: Tensor, x_TC: Tensor, g_THK: Tensor, beta_TH: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64: outputs (T, H, V) and the last state."""
    state, out, size = state.double(), [], HEADS * KEY
    for x_C, g_HK, beta_H in zip(x_TC.double(), g_THK.double(), beta_TH.double(), strict=True):
        q_HK, k_HK, v_HV = (
            each.view(HEADS, -1) for each in (x_C[:size], x_C[size : 2 * size], x_C[2 * size :])
        )  # fmt: skip
        q_HK, k_HK = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q_HK, k_HK))
        heads = []
        for head in range(HEADS):
            decayed = state[head] * g_HK[head].exp()[:, None]
            written = beta_H[head] * (v_HV[head] - k_HK[head] @ decayed)
            heads.append(decayed + torch.outer(k_HK[head], written))
            out.append(q_HK[head] / KEY**0.5 @ heads[-1])
        state = torch.stack(heads)
    return torch.stack(out).view(len(x_TC), HEADS, VALUE), state


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 70])
def test_chunks_are_the_definition(count: int) -> None:
    state = torch.randn(HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(5))
    out, last = by_hand(state, *given(count))
    found = RULE.scan(state, *given(count))
    torch.testing.assert_close(found.double(), out, rtol=0, atol=2e-5)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=2e-5)


def test_a_step_is_the_definition() -> None:
    states = torch.randn(3, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(6))
    inputs = given(3)
    wanted = [by_hand(states[row], *(each[row : row + 1] for each in inputs)) for row in range(3)]
    found = RULE.step(states, *inputs)
    for row, (out, last) in enumerate(wanted):
        torch.testing.assert_close(found[row].double(), out[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(states[row].double(), last, rtol=0, atol=1e-5)
