"""Every entry of a weight lies on a rank, on no other one unless heads of keys are shared, and padding is zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beheld.core.config import EngineArgs
from beheld.parallel.shards import Cut, Zeros, blocks, heads_of, sections, share
from beheld.tools.plan import plan
from tests import tiny


@given(st.integers(1, 400), st.integers(1, 8))
def test_shares_are_equal_and_hold_everything_once(size: int, ranks: int) -> None:
    weight = torch.arange(1.0, size + 1)
    parts = [Cut(0, share(size, rank, ranks)).of(weight, weight.shape) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    joined = torch.cat(parts)
    assert joined[joined > 0].tolist() == weight.tolist()


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 8))
def test_each_head_of_queries_lies_on_one_rank_with_its_head_of_keys(group: int, num_kv: int, ranks: int) -> None:
    found = [heads_of(group * num_kv, num_kv, rank, ranks) for rank in range(ranks)]
    assert len({(len(heads.queries), len(heads.keys)) for heads in found}) == 1
    queries = [head for heads in found for head in heads.queries if head is not None]
    assert sorted(queries) == list(range(group * num_kv))
    for heads in found:
        each = len(heads.queries) // len(heads.keys)
        for place, head in enumerate(heads.queries):
            assert head is None or heads.keys[place // each] == head // group


def test_heads_of_the_models_that_do_not_divide() -> None:
    last = heads_of(25, 25, 1, 2)
    assert last.queries == (*range(13, 25), None)
    assert heads_of(28, 4, 7, 8).keys == (3,)
    assert heads_of(28, 4, 7, 8).queries == (25, 26, 27, None)
    # Three heads of keys on four ranks: one rank has nothing to do.
    assert heads_of(6, 3, 3, 4).queries == (None, None)


def test_sections_are_cut_alike() -> None:
    gate_up = torch.arange(20).view(20, 1).repeat(1, 3)
    parts = [Cut(0, sections(2, 10, rank, 2)).of(gate_up, gate_up.shape)[:, 0].tolist() for rank in (0, 1)]
    assert parts == [[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]]


def test_a_cut_reads_no_more_than_its_pieces() -> None:
    asked: list[object] = []

    class Slice:
        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            asked.append(index)
            return torch.ones(4, 12)[index]

    cut = Cut(1, blocks((1, None, 2), 3))
    made = cut.of(Slice(), (4, 12))
    assert asked == [(slice(None), slice(3, 6)), (slice(None), slice(6, 9))]
    assert made.sum(0).tolist() == [4, 4, 4, 0, 0, 0, 4, 4, 4]
    assert cut.size == 9


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_without_entries_is_zero(dim: int) -> None:
    made = Cut(dim, (Zeros(3),)).of(torch.ones(5, 6, dtype=torch.bfloat16), (5, 6))
    assert made.shape == ((3, 6) if dim == 0 else (5, 3))
    assert made.dtype == torch.bfloat16
    assert not made.any()


def test_a_plan_tells_what_one_of_several_gpus_holds() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("llama")), device="cpu")
    one, two = plan(args, [])["model"], plan(args, [], 2, 1 << 34)["model"]
    assert two["ranks"] == 2
    # Two heads of keys lie on a rank each; norms lie on both.
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert one["parameters"] / 2 < two["parameters"] < one["parameters"] * 0.51
    # Three layers with two sums each, the embedding's, of 64 numbers; and half of 512 logits.
    size = {"float32": 4, "bfloat16": 2}[two["dtype"]]
    assert two["link_bytes_per_token"] == (7 * 64 + 256) * size
    assert two["prompt_link_bytes_per_token"] == 7 * 64 * size
    assert two["kv_tokens"] == (int(0.9 * (1 << 34)) - two["weights_bytes"] - (3 << 30)) // two["kv_bytes_per_token"]


def test_a_plan_tells_what_the_largest_stage_holds() -> None:
    args = EngineArgs(model=str(tiny.checkpoint("qwen3_next")), device="cpu")
    one, staged = plan(args, [])["model"], plan(args, [], 2, 1 << 34, 2)["model"]
    assert (staged["stages"], staged["ranks"]) == (2, 2)
    assert one["weights_bytes"] / 4 < staged["weights_bytes"] < one["weights_bytes"] / 2
    assert staged["stage_bytes_per_token"] == 64 * {"float32": 4, "bfloat16": 2}[staged["dtype"]]
