"""Flat log-probabilities say what lists of dicts say, in columns of one width."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from beheld import LLM, SamplingParams
from beheld.core.flat_logprobs import FlatLogprobs
from beheld.core.outputs import Logprob
from tests import tiny


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        str(tiny.checkpoint("llama")), dtype="float32", seed=0, num_gpu_blocks_override=100, max_logprobs=-1
    ) as made:
        yield made


def both(llm: LLM, **options: Any) -> tuple[Any, Any]:
    """An output with lists, and the same with flat containers."""
    base: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True} | options
    return tuple(  # type: ignore[return-value]
        llm.generate("hello é there", SamplingParams(**base, flat_logprobs=flat), use_tqdm=False)[0]
        for flat in (False, True)
    )


@pytest.mark.parametrize("options", [{"logprobs": 3}, {"logprobs": 0}, {"logprob_token_ids": [5, 6]}, {"logprobs": -1}])
def test_of_an_answer(options: dict[str, Any], llm: LLM) -> None:
    listed, flat = (each.outputs[0].logprobs for each in both(llm, **options))
    assert isinstance(flat, FlatLogprobs)
    assert len(flat) == len(listed) == 12
    assert list(flat) == listed
    assert [flat[place] for place in range(-12, 0)] == listed
    widths = {stop - start for start, stop in zip(flat.start_indices, flat.end_indices, strict=True)}
    assert len(widths) == 1, "all positions are equally wide"


def test_of_a_prompt(llm: LLM) -> None:
    listed, flat = (each.prompt_logprobs for each in both(llm, prompt_logprobs=2))
    assert isinstance(flat, FlatLogprobs)
    assert listed[0] is None
    assert flat[0] == {}
    assert list(flat)[1:] == listed[1:]
    assert len(flat) == len(listed)


def test_pieces_of_a_stream_make_the_whole(llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    messages = [{"role": "user", "content": "hello é"}]
    listed = llm.chat(messages, SamplingParams(**options), use_tqdm=False)[0].outputs[0].logprobs
    stream = llm.chat_stream(messages, SamplingParams(**options, flat_logprobs=True))
    pieces = [piece.outputs[0].logprobs for piece in stream if piece.outputs]
    assert len(pieces) > 1
    assert all(isinstance(piece, FlatLogprobs) for piece in pieces)
    joined = [entry for piece in pieces if piece is not None for entry in piece]

    def shown(entries: Any) -> list[Any]:
        return [[(token, each.rank, each.decoded_token) for token, each in entry.items()] for entry in entries]

    assert listed is not None
    assert shown(joined) == shown(listed)
    # Another run may round otherwise.
    values = [[each.logprob for entry in entries for each in entry.values()] for entries in (joined, listed)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)


def test_it_is_a_sequence_that_only_grows() -> None:
    flat = FlatLogprobs()
    rows = [{1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}, None, {3: Logprob(-0.1, 1, "c")}]
    flat.extend(rows)
    assert list(flat) == [rows[0], {}, rows[2]]
    assert (flat.start_indices, flat.end_indices) == ([0, 2, 2], [2, 2, 3])
    assert (flat.token_ids, flat.ranks, flat.decoded_tokens) == ([1, 2, 3], [1, 2, 1], ["a", "b", "c"])
    part = flat[1:]
    assert (list(part), part.start_indices, part.token_ids) == ([{}, rows[2]], [0, 0], [3])
    assert list(flat[::-2]) == [rows[2], rows[0]]
    assert list(flat[5:]) == []
    part.append(rows[0])
    assert len(flat) == 3
    flat.append_fast([4, 4], [-2.0, -2.0], [3, 1], [None, None])
    assert flat[-1] == {4: Logprob(-2.0, 3, None)}
    for act in (lambda: flat.insert(0, rows[0]), lambda: flat.pop(), lambda: flat.__setitem__(0, rows[0])):
        with pytest.raises(TypeError):
            act()
    with pytest.raises(IndexError):
        flat[9]
    with pytest.raises(TypeError):
        flat["x"]  # type: ignore[call-overload]


def test_its_objects_do_not_grow_with_the_answer() -> None:
    def tracked(count: int) -> int:
        flat = FlatLogprobs()
        for _ in range(count):
            flat.append_fast([1, 2], [-1.0, -2.0], [1, 2], ["a", "b"])
        gc.collect()
        return sum(gc.is_tracked(each) for each in (flat, *vars(flat).values())) + sum(
            gc.is_tracked(each) for column in vars(flat).values() for each in column
        )

    assert tracked(10) == tracked(1000) == 7
