"""States of items that tokens read by their position."""

from __future__ import annotations

import torch

from beheld.attention.cross import CrossRun, read_states


def test_each_token_reads_the_state_at_its_place() -> None:
    """Two sequences, the first one in two ranges; token 3 has no item, and token 4 is behind its item's end."""
    one, other = (torch.arange(count * 8.0).reshape(count, 2, 2, 1, 2) + first for count, first in ((6, 0), (3, 100)))
    runs = (CrossRun(((0, 2), (5, 6)), (one,)), CrossRun(((2, 3), (4, 5)), (other,)))
    found = read_states(runs, 1, torch.tensor([0, 4, 2, 1, 3, 5]))
    wanted = [one[0, 1], one[4, 1], other[2, 1], torch.zeros(2, 1, 2), torch.zeros(2, 1, 2), one[5, 1]]
    assert torch.equal(found, torch.stack(wanted))
