"""Steps of decoding sequences alone are laid out as any others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from beheld.core.plan import SeqSlice
from beheld.runner import batch
from tests.runner.test_rows import BLOCK_SIZE, NUM_GROUPS, admit, make_rows

NO_BLOCKS = ((),) * NUM_GROUPS


class Info:
    """What a layout asks of a model."""

    pooler = None
    both_ways = "items"
    paged_groups = range(NUM_GROUPS)


def laid(slices: Sequence[SeqSlice], rows: Any) -> batch.Layout:
    return batch.lay_out(slices, rows, Info(), BLOCK_SIZE)  # type: ignore[arg-type]


def test_decodes_are_laid_out_as_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows()
    for row in range(3):
        admit(rows, row, [[1 + row, 4 + row, 9 + row], [21 + row, 25 + row, 29 + row]])
    rows.delta_R[:] = 0, 7, 2
    rows.lora_slots_R[:] = 0, 2, 1
    slices = [SeqSlice(row, start, start + 1, NO_BLOCKS, 1) for row, start in ((2, 4), (0, 9), (1, 7))]
    found = laid(slices, rows)
    assert batch._lay_out_decodes(slices, rows, Info(), BLOCK_SIZE) is not None  # type: ignore[arg-type]
    monkeypatch.setattr(batch, "_lay_out_decodes", lambda *given: None)
    wanted = laid(slices, rows)
    for name in ("slices", "counts", "first_token", "sampling", "prompt_targets", "both_ways", "num_decodes", "drafts"):
        assert getattr(found, name) == getattr(wanted, name), name
    np.testing.assert_array_equal(found.lora_slots_T, wanted.lora_slots_T)
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        assert found.arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)


@pytest.mark.parametrize(
    "piece",
    [
        SeqSlice(0, 3, 4, NO_BLOCKS, 1),
        SeqSlice(0, 4, 5, NO_BLOCKS, 0),
        SeqSlice(0, 4, 6, NO_BLOCKS, 2, (5, 6)),
        SeqSlice(0, 4, 5, NO_BLOCKS, 1, (5,)),
    ],
    ids=["a prompt's last token", "nothing is sampled", "a draft", "its token is given"],
)
def test_other_steps_are_not_decodes(piece: SeqSlice) -> None:
    rows = make_rows()
    admit(rows, 0, [[1, 2, 3], [4, 5, 6]])
    admit(rows, 1, [[7, 8, 9], [10, 11, 12]])
    other = SeqSlice(1, 4, 5, NO_BLOCKS, 1)
    assert batch._lay_out_decodes([other, piece], rows, Info(), BLOCK_SIZE) is None  # type: ignore[arg-type]
