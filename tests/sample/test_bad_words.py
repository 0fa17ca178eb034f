"""Bans that depend on what a row said, in all rows at once: rows that come and go, and words of all lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from beheld.core.sampling import Sampling
from beheld.sample.history import History
from beheld.sample.rows import TokenRule
from beheld.sample.sampler import Sampler
from tests.sample.reference import edited

V = 5
CPU = torch.device("cpu")


class Counted(TorchDispatchMode):
    """Counts what a device would have to launch, or to copy."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def repeats(tokens: list[int], size: int) -> set[int]:
    """The tokens that would make the last `size` tokens stand there twice."""
    begin = tokens[len(tokens) - size + 1 :]
    return {
        tokens[at + size - 1]
        for at in range(len(tokens) - size + 1)
        if tokens[at : at + size - 1] == begin and tokens[at + size - 1] < V
    }


@st.composite
def rows(draw: st.DrawFn) -> tuple[Sampling, list[int], int]:
    """A row's parameters, its prompt, and the step that it comes in."""
    word = st.lists(st.integers(0, V - 1), min_size=1, max_size=draw(st.sampled_from([2, 3, 12])))
    params = Sampling(
        max_tokens=30,
        bad_words_ids=tuple(map(tuple, draw(st.lists(word, max_size=5)))),
        no_repeat_ngram=draw(st.sampled_from([0, 1, 2, 3, 5])),
        min_tokens=draw(st.integers(0, 4)),
        stop_ids=draw(st.frozensets(st.integers(0, V - 1), max_size=1)),
    )
    # An id behind those that the head knows stands for media.
    prompt = draw(st.lists(st.sampled_from([*range(V), V + 3]), min_size=1, max_size=40))
    return params, prompt, draw(st.integers(0, 4))


@settings(max_examples=150, deadline=None)
@given(known=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6), leaves=st.integers(0, 9))
def test_rows_that_come_and_go_are_banned_what_the_rules_ban(
    known: list[tuple[Sampling, list[int], int]], seed: int, leaves: int
) -> None:
    sampler = Sampler(len(known), V, CPU)
    outputs: list[list[int]] = [[] for _ in known]
    for step in range(10):
        for row, (params, prompt, comes) in enumerate(known):
            # The first one is put off once and comes back, as after a preemption.
            if step == comes or (row == 0 and step == leaves > comes):
                sampler.release(row)
                sampler.admit(row, params, [*prompt, *outputs[row]], len(prompt))
        batch = [row for row, (_, _, comes) in enumerate(known) if comes <= step][:: -1 if step % 2 else 1]
        if not batch:
            continue
        logits_BV = torch.randn(len(batch), V, generator=torch.Generator().manual_seed(seed + step))
        lengths = [len(known[row][1]) + len(outputs[row]) for row in batch]
        for _ in range(2):
            out = sampler.sample(logits_BV, batch, lengths)
            sampler.append(batch, out.ids_B)
        for place, row in enumerate(batch):
            params, prompt, _ = known[row]
            wanted_V = edited(logits_BV[place], params, prompt, outputs[row])
            if params.no_repeat_ngram:
                wanted_V[list(repeats([*prompt, *outputs[row]], params.no_repeat_ngram))] = -math.inf
            token, broken = int(out.ids_B[place]), bool(out.nan_B[place])
            assert broken == (not wanted_V.isfinite().any())
            assert broken or token == int(wanted_V.argmax())
            outputs[row].append(token)


@pytest.mark.parametrize("banned", [{"bad_words_ids": ((1, 2), (3, 1, 2))}, {"no_repeat_ngram": 3}], ids=str)
def test_many_rows_take_no_more_launches_than_one(banned: dict[str, Any]) -> None:
    counts = []
    for num_rows in (1, 2, 16):
        sampler, batch = Sampler(16, V, CPU), list(range(num_rows))
        for row in batch:
            sampler.admit(row, Sampling(max_tokens=30, **banned), [1, 2, 3], 3)
        logits_BV = torch.randn(num_rows, V)
        sampler.append(batch, sampler.sample(logits_BV, batch, [3] * num_rows).ids_B)
        with Counted() as counted:
            sampler.append(batch, sampler.sample(logits_BV, batch, [4] * num_rows).ids_B)
        counts.append(counted.count)
    assert counts[0] >= counts[1] >= counts[2]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.size = max(self.size, made.numel())
        return made


def test_short_rows_beside_a_long_one_are_not_as_dear_as_it() -> None:
    sampler = Sampler(16, V, CPU)
    prompts = [[1, 2, 3] * 1000, *([1, 2, 3] for _ in range(15))]
    for row, prompt in enumerate(prompts):
        sampler.admit(row, Sampling(max_tokens=30, no_repeat_ngram=3), prompt, len(prompt))
    with Largest() as largest:
        sampler.sample(torch.randn(16, V), range(16), [*map(len, prompts)])
    assert 3000 <= largest.size <= 3000 + 15 * 3


def test_a_history_that_grows_forgets_nothing() -> None:
    history = History(CPU)
    tokens = {history.admit(list(range(30)), 10): list(range(30)), history.admit([7], 16): [7]}
    width = history.ids_SH.shape[1]
    for more in range(100, 120):
        slots = list(tokens)
        lengths = [len(tokens[slot]) for slot in slots]
        ids_R = torch.arange(len(slots)) * 1000 + more
        history.append(slots, torch.tensor(slots), lengths, ids_R)
        for slot, token in zip(slots, ids_R.tolist(), strict=True):
            tokens[slot].append(token)
        if more == 110:
            slot = history.admit([1, 2, 3], 5 * width)
            tokens[slot] = [1, 2, 3]
        columns = history.ids_SH.shape[1]
        for slot, known in tokens.items():
            for position in range(max(0, len(known) - 10), len(known)):
                assert history.ids_SH[slot, position % columns] == known[position]
    assert columns >= 5 * width
    history.release(slot)
    assert history.admit([], 1) == slot


def test_rows_hold_no_more_than_they_can_say_and_give_it_back() -> None:
    sampler = Sampler(16, V, CPU)
    table: Any = sampler._rows.rules[TokenRule.NO_REPEAT]
    before = table._history.ids_SH.numel()
    for row in range(16):
        sampler.admit(row, Sampling(max_tokens=512 - 100, no_repeat_ngram=3), [1] * 100, 100)
    assert table._history.ids_SH.numel() == 16 * 512
    # The last position at which a token is chosen.
    out = sampler.sample(torch.randn(16, V), range(16), [511] * 16)
    sampler.append(range(16), out.ids_B)
    for row in range(16):
        sampler.release(row)
    assert table._history.ids_SH.numel() == before
    sampler.admit(3, Sampling(max_tokens=5, no_repeat_ngram=1), [1, 2], 2)
    assert sampler.sample(torch.tensor([[1.0, 9.0, 8.0, 2.0, 0.0]]), [3], [2]).ids_B.tolist() == [3]
