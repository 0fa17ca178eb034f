"""Caches in the host's memory take none of it until they are written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from beheld.core.errors import CapacityError
from beheld.models.out_of_memory import explained
from beheld.platform.registry import CPU
from beheld.runner.cache.paged import zeros

# Sixteen tensors of 8 MiB, in a process whose allocator serves such sizes from its heap and has freed memory to reuse.
_RESIDENT = """
import os, torch
from beheld.runner.cache.paged import zeros
from beheld.utils.allocator import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

keep_freed_memory()
zeros((4,), torch.float32, torch.device("cpu"))
before = resident()
kept = [zeros((64, 16, 4, 512), torch.float32, torch.device("cpu")) for _ in range(16)]
print(resident() - before)
"""


def test_unwritten_layers_take_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 << 20


def test_they_hold_zeros_and_can_be_written() -> None:
    found = zeros((3, 5, 2), torch.bfloat16, torch.device("cpu"))
    assert found.shape == (3, 5, 2)
    assert not found.any()
    found[1] = 1
    assert found.float().sum() == 10
    assert zeros((0, 4), torch.float32, torch.device("cpu")).shape == (0, 4)


def test_a_layer_begins_with_a_huge_page() -> None:
    kept = [zeros((3 << 20,), torch.int8, torch.device("cpu")) for _ in range(3)]
    assert [each.data_ptr() % (2 << 20) for each in kept] == [0, 0, 0]
    assert [each.numel() for each in kept] == [3 << 20] * 3
    kept[1].fill_(1)
    assert not kept[0].any()
    assert not kept[2].any()


_FEW_BLOCKS = """
import os, torch
from beheld.runner.cache.paged import zeros

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

kept = [zeros((8 << 20,), torch.int8, torch.device("cpu")) for _ in range(16)]
before = resident()
for each in kept:
    each[: 1 << 16] = 1
print(resident() - before)
"""


def test_the_first_blocks_of_a_layer_take_no_huge_page() -> None:
    done = subprocess.run([sys.executable, "-c", _FEW_BLOCKS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 20


def test_a_cache_larger_than_the_system_maps_is_a_lack_of_memory() -> None:
    with pytest.raises(CapacityError, match="Lower it"), explained("hold the cache", CPU, "Lower it."):
        # Beyond any address.
        zeros((1 << 60,), torch.int8, torch.device("cpu"))
