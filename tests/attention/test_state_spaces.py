"""State spaces in chunks are those token by token, whatever the length, the groups and the state before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from beheld.attention.selective_scan import SelectiveScan
from beheld.attention.ssd import StateSpace
from beheld.attention.wkv import WeightedMean

GROUPS, HEADS, HEAD_DIM, STATE_DIM = 2, 6, 5, 7
CHANNELS = 9


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_heads(**bounds: float) -> StateSpace:
    """Decays of heads from slow to one that forgets all at once."""
    a_H = -torch.tensor([0.01, 0.1, 0.5, 1.0, 4.0, 60.0])
    return StateSpace(GROUPS, HEAD_DIM, STATE_DIM, a_H, random(HEADS, seed=1), **bounds)


def head_inputs(count: int) -> tuple[Tensor, Tensor]:
    width = HEADS * HEAD_DIM + 2 * GROUPS * STATE_DIM
    return random(count, width, seed=2), random(count, HEADS, seed=3).exp()


def heads_by_hand(space: StateSpace, state: Tensor, x_TC: Tensor, dt_TH: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64: outputs (T, H * P) and the last state."""
    state, out = state.double(), []
    for x_C, dt_H in zip(x_TC.double(), dt_TH.double(), strict=True):
        x_HP = x_C[: HEADS * HEAD_DIM].view(HEADS, HEAD_DIM)
        b_GN, c_GN = x_C[HEADS * HEAD_DIM :].view(2, GROUPS, STATE_DIM)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            decayed = state[head] * (dt_H[head] * space.a_H[head]).exp()
            heads.append(decayed + torch.outer(dt_H[head] * x_HP[head], b_GN[group]))
            out.append(heads[-1] @ c_GN[group] + space.d_H[head] * x_HP[head])
        state = torch.stack(heads)
    return torch.stack(out).view(len(x_TC), -1), state


def of_channels() -> SelectiveScan:
    return SelectiveScan(-random(CHANNELS, STATE_DIM, seed=4).exp(), random(CHANNELS, seed=5))


def channel_inputs(count: int) -> tuple[Tensor, ...]:
    sizes = (CHANNELS, CHANNELS, STATE_DIM, STATE_DIM)
    x_TI, dt_TI, b_TN, c_TN = (random(count, size, seed=6 + place) for place, size in enumerate(sizes))
    return x_TI, dt_TI.exp(), b_TN, c_TN


def channels_by_hand(scan: SelectiveScan, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64: outputs (T, I) and the last state."""
    state, out = state.double(), []
    for x_I, dt_I, b_N, c_N in zip(*(each.double() for each in inputs), strict=True):
        state = state * (dt_I[:, None] * scan.a_IN).exp() + torch.outer(dt_I * x_I, b_N)
        out.append(state @ c_N + scan.d_I * x_I)
    return torch.stack(out), state


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_chunks_of_heads_are_the_definition(count: int) -> None:
    space, state = of_heads(), random(HEADS, HEAD_DIM, STATE_DIM, seed=10)
    out, last = heads_by_hand(space, state, *head_inputs(count))
    same(space.scan(state, *head_inputs(count)), out)
    same(state, last)


def test_a_step_of_heads_is_the_definition() -> None:
    space, states = of_heads(least=0.5), random(3, HEADS, HEAD_DIM, STATE_DIM, seed=11)
    inputs = head_inputs(3)
    wanted = [heads_by_hand(space, states[row], *(each[row : row + 1] for each in inputs)) for row in range(3)]
    out = space.step(states, *inputs)
    for row, (wanted_1X, last) in enumerate(wanted):
        same(out[row : row + 1], wanted_1X)
        same(states[row], last)


def test_step_sizes_of_prompts_are_bounded() -> None:
    space, state = of_heads(least=0.5, most=1.5), random(HEADS, HEAD_DIM, STATE_DIM, seed=12)
    x_TC, dt_TH = head_inputs(70)
    assert (dt_TH < 0.5).any()
    assert (dt_TH > 1.5).any()
    out, last = heads_by_hand(space, state, x_TC, dt_TH.clamp(0.5, 1.5))
    same(space.scan(state, x_TC, dt_TH), out)
    same(state, last)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_chunks_of_channels_are_the_definition(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a chunk has fewer tokens than there are."""
    monkeypatch.setattr("beheld.attention.selective_scan._CHUNK_NUMBERS", 7 * CHANNELS * STATE_DIM)
    scan, state = of_channels(), random(CHANNELS, STATE_DIM, seed=13)
    out, last = channels_by_hand(scan, state, *channel_inputs(count))
    same(scan.scan(state, *channel_inputs(count)), out)
    same(state, last)


def test_a_step_of_channels_is_the_definition() -> None:
    scan, states = of_channels(), random(3, CHANNELS, STATE_DIM, seed=14)
    inputs = channel_inputs(3)
    wanted = [channels_by_hand(scan, states[row], *(each[row : row + 1] for each in inputs)) for row in range(3)]
    out = scan.step(states, *inputs)
    for row, (wanted_1I, last) in enumerate(wanted):
        same(out[row : row + 1], wanted_1I)
        same(states[row], last)


def means_by_hand(mean: WeightedMean, keys_TA: Tensor, values_TA: Tensor) -> Tensor:
    """The definition in float64: every value's weight follows from how long ago it was."""
    keys_TA, values_TA, out = keys_TA.double(), values_TA.double(), []
    for now in range(len(keys_TA)):
        ages = torch.arange(now - 1, -1, -1, dtype=torch.float64)[:, None]
        weights_TA = (torch.cat([keys_TA[:now] - ages * mean.decay_A, keys_TA[now : now + 1] + mean.first_A])).exp()
        out.append((weights_TA * values_TA[: now + 1]).sum(0) / weights_TA.sum(0))
    return torch.stack(out)


def test_weighted_means_are_the_definition() -> None:
    """Also where the first keys are so small that their exponentials vanish beside one."""
    mean = WeightedMean(random(CHANNELS, seed=1).exp(), random(CHANNELS, seed=2))
    keys_TA, values_TA = random(12, CHANNELS, seed=3) * 4 - 200, random(12, CHANNELS, seed=4)
    keys_TA[6:] += 195
    state = torch.zeros(3, CHANNELS)
    parts = [mean.scan(state, keys_TA[:5], values_TA[:5])]
    states = torch.stack([state, torch.zeros(3, CHANNELS)])
    steps = [mean.step(states, keys_TA[t : t + 1].expand(2, -1), values_TA[t : t + 1].expand(2, -1)) for t in (5, 6)]
    parts += [each[:1] for each in steps]
    parts.append(mean.scan(states[0], keys_TA[7:], values_TA[7:]))
    torch.testing.assert_close(torch.cat(parts).double(), means_by_hand(mean, keys_TA, values_TA), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(steps[0][1], values_TA[5])
