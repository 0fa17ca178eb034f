"""Sums and gathers through memory that ranks of one host share; here the ranks are threads."""

from __future__ import annotations

import platform
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.parallel import host_sums
from beheld.parallel.group import RankGroup
from beheld.parallel.host_sums import HostSums

pytestmark = pytest.mark.skipif(platform.machine() not in host_sums._ORDERED, reason="gloo sums here")


def side_by_side(ranks: list[Any], work: Callable[[int, Any], Any]) -> list[Any]:
    """What each rank makes of it, each in a thread of its own."""
    found: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        found[rank] = work(rank, ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gathers_of_any_sizes_one_after_another(size: int, dtype: torch.dtype) -> None:
    with host_sums.made() as path:
        ranks = [HostSums(path, rank, size) for rank in range(size)]
    torch.manual_seed(size)
    shapes = [(1,), (3, 5), (200, 7), (2, 1, 4)] * 5
    given = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(size)]

    def work(rank: int, sums: HostSums) -> list[tuple[Tensor, Tensor]]:
        made = []
        for x in given[rank]:
            summed = x.clone()
            sums.sum_(summed)
            made.append((summed, sums.joined(x)))
        return made

    found = side_by_side(ranks, work)
    for place in range(len(shapes)):
        wanted = torch.stack([given[rank][place].double() for rank in range(size)])
        for rank in range(size):
            summed, joined = found[rank][place]
            assert torch.equal(summed, found[0][place][0])
            assert torch.allclose(summed.double(), wanted.sum(0), rtol=2e-2, atol=2e-2)
            assert torch.equal(joined.double(), wanted.flatten())


def test_short_waits_are_no_waits_for_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late by 0.2 ms, as in most sums of a step; a sleep of nothing takes 0.05 ms or more."""
    slept: list[float] = []
    monkeypatch.setattr(host_sums, "time", types.SimpleNamespace(sleep=slept.append))
    with host_sums.made() as path:
        ranks = [HostSums(path, rank, 2) for rank in range(2)]

    def work(rank: int, sums: HostSums) -> int:
        x, without = torch.zeros(4), 0
        for _ in range(40):
            until = time.perf_counter() + 2e-4 * rank
            while time.perf_counter() < until:
                pass
            before = len(slept)
            sums.sum_(x)
            without += len(slept) == before
        return without

    # Not all: a rank may lose its core for longer.
    assert side_by_side(ranks, work)[0] >= 20


def test_tensors_larger_than_the_memory_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sums, "MOST_BYTES", 64)
    groups = [RankGroup(rank, 3, tmp_path, None, lambda: None) for rank in range(3)]
    counts = (4, 16, 17, 40, 64, 161)

    def work(rank: int, group: RankGroup) -> list[Tensor]:
        made = []
        for count in counts:
            x = torch.arange(float(count)) + 1000 * rank
            made.append(group.joined(x.view(1, -1)))
            group.sum_(x)
            made.append(x)
        strided = torch.full((40, 2), rank + 1.0)[:, 0]
        group.sum_(strided)
        return [*made, strided]

    for found in side_by_side(groups, work):
        assert torch.equal(found.pop(), torch.full((40,), 6.0))
        for count in counts:
            own = torch.arange(float(count))
            joined, summed, *found = found
            assert torch.equal(joined, torch.cat([own, own + 1000, own + 2000]).view(1, -1))
            assert torch.equal(summed, 3 * own + 3000)
    for group in groups:
        assert group._near is not None
        # 1, 1, 2, 3, 4 and 11 pieces, each added up and gathered, and the strided one's 3.
        assert group._near._number == 2 * 22 + 3
        group.close()


def test_if_one_rank_has_no_such_memory_all_sums_are_gloos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = iter([True, False])

    class Refused(HostSums):
        def __init__(self, *given: Any) -> None:
            if next(refused):
                raise OSError("no space left")
            super().__init__(*given)

    monkeypatch.setattr("beheld.parallel.group.HostSums", Refused)
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]

    def work(rank: int, group: RankGroup) -> list[float]:
        x = torch.full((4,), rank + 1.0)
        group.sum_(x)
        found: list[float] = x.tolist()
        return found

    assert side_by_side(groups, work) == [[3.0] * 4] * 2
    for group in groups:
        assert group._near is None
        group.close()


def test_the_memory_is_no_file_that_a_disk_keeps(tmp_path: Path) -> None:
    """Of a file that is mapped and written, the kernel writes out pages, and each of them faults again."""
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    side_by_side(groups, lambda rank, group: group.sum_(torch.ones(4)))
    mapped = [
        line.split(None, 5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "beheld-ranks" in line
    ]
    assert len(mapped) >= 2
    assert all(name.startswith("/memfd:") for name in mapped)
    for group in groups:
        assert group._near is not None
        group.close()
