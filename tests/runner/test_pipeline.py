"""Stages stay in step, whichever of them fails, and wherever: each reads its own step's messages."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from beheld.core.errors import EngineDeadError, StatesLostError, StepError
from beheld.runner.pipeline import Pipeline

ROW = 1
Wire = defaultdict[tuple[int, int, str], deque[Tensor]]


class Group:
    """One stage's end of queues between stages; reading what was not sent is an error."""

    broken = False

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        self.rank, self.size, self._wire = rank, size, wire
        self._opened = False

    def open_lines(self, device: torch.device) -> None:
        self._opened = True

    def send(self, x: Tensor, to: int) -> None:
        assert self._opened, "between GPUs, the first send would wait for its receiver"
        self._wire[self.rank, to, "device"].append(x.clone())

    def send_host(self, x: Tensor, to: int) -> None:
        self._wire[self.rank, to, "host"].append(x)

    def receive(self, x: Tensor, source: int) -> None:
        found = self._wire[source, self.rank, "device"].popleft()
        assert found.nbytes == x.nbytes
        x.copy_(found.flatten().view(x.dtype).view(x.shape))

    def receive_host(self, count: int, source: int) -> list[int]:
        numbers: list[int] = self._wire[source, self.rank, "host"].popleft().tolist()
        assert len(numbers) == count
        return numbers


class Line:
    """Stages whose hidden states are the step's number, and whose sampled token is ten times that."""

    def __init__(self, size: int) -> None:
        self.wire: Wire = defaultdict(deque)
        groups: list[Any] = [Group(rank, size, self.wire) for rank in range(size)]
        made = (Pipeline(group, torch.device("cpu"), torch.bfloat16, sends_embeds=True) for group in groups)
        self.stages = list(made)
        self.newest = [torch.zeros(4, dtype=torch.int64) for _ in range(size)]

    def step(self, number: int, failing: int = -1, where: str = "", held: tuple[int, ...] = ()) -> list[str]:
        """Run a step; returns how each stage left it."""
        return [self._stage(at, number, where if at == failing else "", at in held) for at in range(len(self.stages))]

    def _stage(self, at: int, number: int, where: str, held: bool) -> str:
        pipe = self.stages[at]
        embeds = torch.full((3, 5), number, dtype=torch.float32)
        hidden = torch.full((1, 3, 4), number, dtype=torch.bfloat16)
        try:
            with pipe.step(number, [ROW], 1):
                if where == "before":
                    raise MemoryError
                if where == "lost":
                    raise StatesLostError("It was overwritten.")
                if not pipe.last and not held:
                    pipe.settle([ROW], self.newest[at])
                if held:
                    pipe.skip()
                elif not pipe.first:
                    found, others, _ = pipe.receive(torch.zeros_like(embeds))
                    assert torch.equal(found, hidden)
                    assert torch.equal(others, embeds)
                if where == "amid":
                    raise MemoryError
                if not pipe.last and not held:
                    pipe.send(hidden, embeds, 0)
                if pipe.last:
                    pipe.pay(torch.tensor([ROW]), torch.tensor([10 * number]))
        except (MemoryError, StepError, StatesLostError) as error:
            return type(error).__name__
        return "ok"

    def settled(self) -> list[int]:
        """The newest token that each stage but the last knows, when nothing remains to be read."""
        for pipe, newest in zip(self.stages[:-1], self.newest, strict=False):
            pipe.settle([ROW], newest)
        assert not any(self.wire.values())
        return [int(newest[ROW]) for newest in self.newest[:-1]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("where", ["before", "amid"])
def test_a_step_that_fails_leaves_the_next_one_in_step(size: int, where: str) -> None:
    for failing in range(size):
        line = Line(size)
        assert line.step(1) == ["ok"] * size
        left = ["ok"] * failing + ["MemoryError"] + ["StepError"] * (size - 1 - failing)
        assert line.step(2, failing, where) == left
        assert line.settled() == [10] * (size - 1)
        assert line.step(2) == line.step(3) == ["ok"] * size
        assert line.settled() == [30] * (size - 1)


def test_a_step_is_finished_from_what_stages_have_kept() -> None:
    line = Line(3)
    assert line.step(1, held=(0, 1, 2)) == ["ok"] * 3
    assert line.settled() == [10, 10]


@pytest.mark.parametrize(
    ("lost", "held", "left"),
    [
        (2, (0, 1), ["ok", "ok", "StatesLostError"]),
        (1, (0, 2), ["ok", "StatesLostError", "StatesLostError"]),
        (0, (), ["StatesLostError"] * 3),
        # The last one had not begun, and gets no hidden states again.
        (-1, (0, 1), ["ok", "ok", "StatesLostError"]),
    ],
)
def test_a_step_that_one_stage_cannot_compute_again_is_lost(lost: int, held: tuple[int, ...], left: list[str]) -> None:
    line = Line(3)
    assert line.step(1, lost, "lost", held) == left
    assert line.step(2) == ["ok"] * 3
    assert line.settled() == [20, 20]


def test_stages_that_are_out_of_step_end_the_engine() -> None:
    """So no request ever gets another's answer."""
    line = Line(2)
    assert line._stage(0, 1, "", held=False) == "ok"
    with pytest.raises(EngineDeadError, match="step 1 in step 2"):
        line._stage(1, 2, "", held=False)
