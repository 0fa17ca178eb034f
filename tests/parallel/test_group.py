"""A group of one rank: its collectives in compiled code, and of tensors without entries."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from beheld.models.surgery.sharded import JoinedOverRanks, SummedOverRanks
from beheld.parallel.group import RankGroup, RankGroups
from beheld.parallel.meeting import Folder
from beheld.platform.nccl import NCCL


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    """Of this process alone."""
    made = RankGroup(0, 1, tmp_path, None, lambda: None)
    yield made
    made.close()


@torch.inference_mode()
def test_layers_are_compiled_whole_with_their_sums(group: RankGroup) -> None:
    torch.manual_seed(0)
    down, head = nn.Linear(6, 4), nn.Linear(4, 9)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = SummedOverRanks(down, group)
            self.head = JoinedOverRanks(head, group, 7)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(x[..., :4] + self.down(x))
            return made

    layer, x = Layer(), torch.randn(2, 3, 6)
    wanted = head(x[..., :4] + down(x))[..., :7]
    assert torch.equal(layer(x), wanted)
    before = group.entered
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), wanted)
    assert group.entered == before + 2


def test_tensors_without_entries_need_no_collective(group: RankGroup) -> None:
    group.sum_(torch.empty(0, 4))
    assert group.joined(torch.empty(2, 0, 4)).shape == (2, 0, 4)
    assert group.entered == 0
    assert group.least([3, -4]) == [3, -4]


def test_after_a_collective_has_failed_none_is_entered(tmp_path: Path) -> None:
    group = RankGroup(0, 2, tmp_path, None, lambda: None)
    calls = list[int]()

    class Closed:
        def allreduce(self, *given: Any) -> Any:
            calls.append(1)
            raise RuntimeError("Connection closed by peer")

    group._host = group._device = Closed()
    group._least = None
    with pytest.raises(RuntimeError, match="closed by peer"):
        group.least([1])
    assert group.broken
    with pytest.raises(RuntimeError, match="has failed"):
        group.least([1])
    assert calls == [1]
    group.close()


def test_what_ranks_ask_alike_is_known_within_the_limit(tmp_path: Path) -> None:
    from torch import distributed

    store: Any = distributed.FileStore(str(tmp_path / "ranks"), 2)
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    for group in groups:
        # As if connected.
        group._host, group._store = object(), store
    begun = time.monotonic()
    assert not groups[0].alike("this", 0.2)
    assert 0.2 <= time.monotonic() - begun < 3.0
    assert groups[1].alike("this", 5.0)
    assert groups[0].alike("this", 0.0)
    for group in groups:
        group._host = None
        group.close()


def test_a_system_without_proc_has_sums_by_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS: neither descriptors are listed nor is there memory without a file."""

    def absent(path: Path) -> Iterator[Path]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "iterdir", absent)
    monkeypatch.delattr(os, "memfd_create")
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    tensors = [torch.full((3,), rank + 1.0) for rank in range(2)]
    threads = [threading.Thread(target=group.sum_, args=(x,)) for group, x in zip(groups, tensors, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(x.tolist() == [3.0] * 3 for x in tensors)
    for group in groups:
        assert group._near is None
        group.abort()
        group.close()


@pytest.mark.parametrize("waiting", ["sum", "receive"])
def test_abort_ends_what_waits_for_a_rank_that_is_gone(tmp_path: Path, waiting: str) -> None:
    """A lost host closes no connection; here the other rank is there and never comes."""
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    threads = [threading.Thread(target=group.least, args=([1],), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    timer = threading.Timer(0.05, groups[0].abort)
    timer.start()
    x = torch.ones(2)
    with pytest.raises(RuntimeError):
        groups[0].sum_(x) if waiting == "sum" else groups[0].receive(x, 1)
    assert groups[0].broken
    timer.join()
    for group in groups:
        group.close()


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_communicators_of_one_gpu_end_together(tmp_path: Path, leave: str) -> None:
    """An abort of NCCL waits for the kernels of every communicator, which end when theirs is aborted."""
    begun = threading.Barrier(4)

    class Communicator:
        def abort(self) -> None:
            begun.wait(4.0)

    groups: Any = RankGroups(0, 2, 2, Folder(tmp_path), NCCL, lambda: None)
    for group in groups.all:
        group._device, group._back = Communicator(), Communicator()
    if leave == "close":
        # Each group by itself.
        begun = threading.Barrier(2)
        groups.close()
    else:
        groups.abort()
    assert not begun.broken
    for group in groups.all:
        group._device = group._back = None
    groups.close()


class Library:
    """A vendor's collectives, as far as a CPU can have them: gloo's, in groups of their own."""

    name = "OTHERCCL"

    def __init__(self) -> None:
        self.made: list[tuple[Any, int, int]] = []
        self.interfaces: list[str | None] = []
        self.left = 0

    def hold(self, interface: str | None) -> None:
        """Note it."""
        self.interfaces.append(interface)

    def leave(self) -> None:
        """Note it."""
        self.left += 1

    def group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        """Connect the ranks of this host."""
        from torch import distributed

        dist: Any = distributed
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = limit
        made = dist.ProcessGroupGloo(store, rank, size, options)
        self.made.append((made, rank, size))
        return made


def test_a_platform_s_own_library_carries_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And only that: it is held as long as the group needs it, and sends back have a group of their own."""
    libraries = [Library(), Library()]
    groups = [RankGroup(rank, 2, tmp_path, libraries[rank], lambda: None) for rank in range(2)]
    found: list[tuple[list[float], list[float], float]] = []

    def run(group: RankGroup) -> None:
        x, sent = torch.full((3,), group.rank + 1.0), torch.zeros(1)
        group.sum_(x)
        joined = group.joined(torch.full((1,), float(group.rank)))
        group.open_lines(torch.device("cpu"))
        if group.rank == 0:
            group.send(torch.full((1,), 7.0), 1)
            group.receive(sent, 1)
        else:
            group.receive(sent, 0)
            group.send(sent + 1, 0)
        found.append((x.tolist(), joined.tolist(), sent.item()))

    with caplog.at_level("INFO", logger="beheld"):
        threads = [threading.Thread(target=run, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(found) == [([3.0] * 3, [0.0, 1.0], 7.0), ([3.0] * 3, [0.0, 1.0], 8.0)]
    assert "All sums over GPUs are OTHERCCL's: " in caplog.text
    for group, library in zip(groups, libraries, strict=True):
        ends: Any = (group._device, group._back)
        assert library.made == [(end, group.rank, 2) for end in ends]
        assert group._host not in ends
        assert (len(library.interfaces), library.left) == (1, 0)
        group.close()
        group.close()
        assert library.left == 1
