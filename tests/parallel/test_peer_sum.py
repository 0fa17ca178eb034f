"""Sums over GPUs that write to one another's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld.parallel import group as groups
from beheld.parallel import peers
from beheld.parallel.group import RankGroup
from beheld.parallel.peers import PeerSums
from beheld.platform.triton import HAS_TRITON
from tests import interpreted


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_the_kernel_in_the_interpreter() -> None:
    interpreted.run(Path(__file__).with_name("peer_sum_interpreted.py"))


CPU = torch.device("cpu")


class Memory:
    """Of a device that can do all of it, or cannot open others' memory."""

    handle_bytes = 64

    def __init__(self, fails: bool) -> None:
        self.fails, self.closed = fails, 0

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        return 4096, b"h" * 64

    def open(self, handle: bytes) -> int:
        if self.fails:
            raise RuntimeError("no way there")
        return 8192

    def close(self) -> None:
        self.closed += 1


def told(own: bytes, ranks: int) -> list[bytes]:
    return [own] * ranks


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_more_ranks_than_the_flags_have_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of a ninth rank would be the next program's first."""
    from beheld.parallel.peer_sum_kernel import MAX_RANKS

    memory, said = Memory(fails=False), list[bytes]()
    monkeypatch.setattr(peers, "platform_of", lambda device: SimpleNamespace(peer_memory=lambda: memory))

    def exchange(own: bytes) -> list[bytes]:
        said.append(own)
        return told(own, MAX_RANKS + 1)

    with pytest.raises(RuntimeError, match="room for 8 ranks"):
        PeerSums(0, MAX_RANKS + 1, CPU, exchange)
    assert [each[0] for each in said] == [0]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("at", ["open", "tensors", "exchange"])
def test_memory_is_given_back_wherever_it_fails(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(fails=at == "open")
    monkeypatch.setattr(peers, "platform_of", lambda device: SimpleNamespace(peer_memory=lambda: memory))

    def exchange(own: bytes) -> list[bytes]:
        if at == "exchange":
            raise RuntimeError("a rank is gone")
        return told(own, 2)

    # No tensor can be made on this device.
    device = torch.device("meta:0") if at != "tensors" else torch.device("cuda:77")
    with pytest.raises((RuntimeError, AssertionError)):
        PeerSums(0, 2, device, exchange)
    assert memory.closed == 1


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_a_rank_takes_part_in_the_exchange_whatever_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(peers, "platform_of", lambda device: SimpleNamespace(peer_memory=broken))
    said = list[bytes]()

    def exchange(own: bytes) -> list[bytes]:
        said.append(own)
        return told(own, 2)

    with pytest.raises(RuntimeError, match="no such library"):
        PeerSums(0, 2, CPU, exchange)
    assert [len(each) for each in said] == [1 + 16 + 64]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_a_handle_of_another_host_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(fails=False)
    monkeypatch.setattr(peers, "platform_of", lambda device: SimpleNamespace(peer_memory=lambda: memory))
    with pytest.raises(RuntimeError, match="several hosts"):
        PeerSums(0, 2, CPU, lambda own: [own, own[:1] + b"x" * 16 + own[17:]])
    assert memory.closed == 1


class Tried:
    """Peers whose trial does something."""

    trial: Any = None
    made: Tried

    def __init__(self, rank: int, ranks: int, device: torch.device, exchange: Any) -> None:
        self.aborted = self.closed = False
        Tried.made = self

    def tried(self) -> bool:
        return bool(Tried.trial(self))

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr(groups, "PeerSums", Tried)
    made = RankGroup(0, 1, tmp_path, None, lambda: None)
    yield made
    made.close()


def test_a_trial_that_raises_is_told_to_all_ranks(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(peers: Any) -> bool:
        raise ValueError("no compiler")

    monkeypatch.setattr(Tried, "trial", raises)
    assert group._find_peers(CPU) is None
    # Both questions were asked, as on a rank whose trial is right.
    assert group.entered == 2
    assert Tried.made.closed


def test_a_trial_ends_when_ranks_are_gone(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(peers: Any) -> bool:
        group.abort()
        return not peers.aborted

    monkeypatch.setattr(Tried, "trial", waits)
    assert group._find_peers(CPU) is None
    assert Tried.made.aborted
    assert group._peers is None
