"""The noise is what it says it is: a fixed function, uniform, and independent from one key and index to the next."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from beheld.sample.noise import Noise, keys, mix_seed

CPU = torch.device("cpu")


def uniforms(seeds: list[int], positions: list[int], num_ids: int) -> np.ndarray:
    mixed = np.array([mix_seed(seed) for seed in seeds], dtype=np.uint64)
    keys_B2 = torch.from_numpy(keys(mixed, np.array(positions, dtype=np.uint64)))
    return Noise(num_ids, CPU).uniform(keys_B2).numpy()


def lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_it_is_the_function_described() -> None:
    assert mix_seed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0
    mixed = np.array([mix_seed(2**64 - 1)], dtype=np.uint64)
    assert mix_seed(2**64 - 1) == mix_seed(-1)
    key_12 = keys(mixed, np.array([7], dtype=np.uint64))
    low, high = (int(word) & 0xFFFFFFFF for word in key_12[0])
    noise = Noise(1000, CPU).uniform(torch.from_numpy(key_12))[0]
    for index in (0, 1, 17, 999):
        x = lowbias32(index + 1) ^ low
        x = (((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF) ^ high
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        x ^= x >> 16
        assert noise[index].item() == pytest.approx(((x & 0x7FFFFFFF) + 0.5) / 2**31, rel=1e-6)


def test_some_indices_alone_get_the_same_noise() -> None:
    noise = Noise(5000, CPU)
    keys_B2 = torch.from_numpy(keys(np.array([3, 4], dtype=np.uint64), np.array([1, 2], dtype=np.uint64)))
    ids_N = torch.tensor([4999, 0, 31, 32])
    assert torch.equal(noise.uniform(keys_B2, ids_N), noise.uniform(keys_B2)[:, ids_N])
    assert torch.equal(noise.exponential(keys_B2[1:], ids_N)[0], noise.exponential(keys_B2, ids_N)[1])


def test_exponential_noise_is_positive_and_finite_at_the_ends() -> None:
    # The two ends of the 31 bits, through the same arithmetic.
    ends = torch.tensor([0, 0x7FFFFFFF]).float().add(0.5).mul(2.0**-31).clamp_max(1 - 2.0**-24)
    assert ((ends > 0) & (ends < 1)).all()
    noise_BN = Noise(200_000, CPU).exponential(torch.tensor([[1, 2], [-3, 4]], dtype=torch.int32))
    assert (noise_BN > 0).all()
    assert noise_BN.isfinite().all()
    assert noise_BN.mean().item() == pytest.approx(1.0, abs=0.01)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic lies above its mean."""
    degrees = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [([0] * 64, list(range(64))), (list(range(64)), [0] * 64), ([2**40 * i for i in range(64)], [2**20] * 64)],
    ids=["positions", "seeds", "far seeds"],
)
def test_uniform_over_indices_and_keys(seeds: list[int], positions: list[int]) -> None:
    u_BN = uniforms(seeds, positions, 4096)
    for values in (u_BN, u_BN[:, :64], u_BN[0], u_BN[:, 0]):
        flat = np.sort(values.ravel())
        steps = np.arange(1, len(flat) + 1) / len(flat)
        distance = max(np.abs(flat - steps).max(), np.abs(flat - steps + 1 / len(flat)).max())
        assert distance * math.sqrt(len(flat)) < 1.95  # Kolmogorov and Smirnov, one in a thousand
    counts = np.histogram(u_BN, bins=4096, range=(0, 1))[0]
    assert chi_square(counts, np.full(4096, u_BN.size / 4096)) < 4
    low_bits = (u_BN * 2**24).astype(np.int64) % 256
    assert chi_square(np.bincount(low_bits.ravel(), minlength=256), np.full(256, u_BN.size / 256)) < 4


@pytest.mark.parametrize("shift", [(0, 1), (0, 2), (0, 256), (1, 0), (1, 1), (2, 0)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    """Pairs of neighbouring indices, positions and seeds fill the unit square evenly."""
    for seeds, positions in (([5] * 66, list(range(66))), (list(range(66)), [5] * 66)):
        u_BN = uniforms(seeds, positions, 4096)
        down, right = shift
        first = u_BN[: u_BN.shape[0] - down, : u_BN.shape[1] - right]
        second = u_BN[down:, right:]
        cells = (first * 32).astype(int) * 32 + (second * 32).astype(int)
        counts = np.bincount(cells.ravel(), minlength=1024)
        assert chi_square(counts, np.full(1024, cells.size / 1024)) < 4
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) * math.sqrt(first.size) < 4
