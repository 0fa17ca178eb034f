"""Which graph carries out a step in which something prefills."""

from __future__ import annotations

import pytest

from beheld.core.config import EngineConfig
from beheld.runner.mixed_graphs import ladder, smallest
from tests.fakes import fake_config


def config(tokens: int, rows: int) -> EngineConfig:
    return fake_config(max_num_batched_tokens=tokens, max_num_seqs=rows)


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 256), (2048, 8), (100, 4), (5000, 64), (32768, 512)])
def test_no_graph_is_larger_than_a_step_can_be(tokens: int, rows: int) -> None:
    sizes = ladder(config(tokens, rows))
    assert len(set(sizes)) == len(sizes)
    assert all(size[0] <= tokens and size[1] <= rows for size in sizes)
    assert max(sizes)[0] == min(tokens, 8192), "a full step has a graph"


def test_the_smallest_that_holds_a_step_is_taken() -> None:
    sizes = ladder(config(8192, 256))
    assert smallest(sizes, 282, 1) == (288, 32)
    assert smallest(sizes, 593, 1) == (640, 32)
    assert smallest(sizes, 282, 33) == (384, 256)
    assert smallest(sizes, 8192, 29) == (8192, 256)


def test_much_padding_is_no_gain() -> None:
    sizes = ladder(config(8192, 256))
    assert smallest(sizes, 4097, 20) is None
    assert smallest(sizes, 8193, 20) is None
    assert smallest(sizes, 600, 257) is None
