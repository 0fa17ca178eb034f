"""What goes up in turns is never written while its last copy is still to be made."""

from __future__ import annotations

import torch

from beheld.runner.staging import Ring


class Moment:
    """Stands for an event of a device that does nothing until it is waited for."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def record(self) -> None:
        self._log.append(f"copied {self._number}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._number}")


def test_a_buffer_s_last_copy_is_waited_for() -> None:
    log: list[str] = []
    ring = Ring(lambda pinned: torch.zeros(4, dtype=torch.int64), torch.device("cpu"))
    count = len(ring.buffers)
    assert count > 2, "one is copied, one waits for that, and one is written"
    ring._copied = tuple(Moment(log, number) for number in range(count))  # type: ignore[assignment]
    target, turns = torch.zeros(3, dtype=torch.int64), []
    for step in range(3 * count):
        turns.append(ring.turn())
        assert log[-1] == f"wait {turns[-1]}"
        ring.buffers[turns[-1]].fill_(step)
        ring.send(turns[-1], target)
        assert log[-1] == f"copied {turns[-1]}"
        assert target.tolist() == [step] * 3
    assert all(len(set(turns[first : first + count])) == count for first in range(2 * count))
