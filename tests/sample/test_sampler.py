"""The sampler against its rules written out slowly, and what it promises about batches, seeds and broken rows."""

from __future__ import annotations

import dataclasses
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from beheld.core.errors import ParamsError
from beheld.core.plan import PromptLogprobs
from beheld.core.sampling import Sampling
from beheld.sample import filters
from beheld.sample.filters import Masks
from beheld.sample.sampler import SampleOutput, Sampler, greedy
from tests.sample.reference import edited, probabilities

V = 101
CPU = torch.device("cpu")
PATHS = ["row by row", "all at once"]


def make(path: str = PATHS[0], vocab_size: int = V, rows: int = 8) -> Sampler:
    """A sampler on the CPU, drawing as there or as on a GPU."""
    sampler = Sampler(rows, vocab_size, CPU)
    if path == PATHS[1]:
        sampler._sample_on_cpu = sampler._sample_at_once  # type: ignore[method-assign]
    return sampler


def logits(rows: int, seed: int = 0, vocab_size: int = V, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def one(params: Sampling, logits_V: Tensor, prompt: Sequence[int] = (1, 2), output: Sequence[int] = ()) -> int:
    sampler = make(vocab_size=len(logits_V))
    sampler.admit(0, params, (*prompt, *output), len(prompt))
    return int(sampler.sample(logits_V[None], [0], [len(prompt) + len(output)]).ids_B)


@st.composite
def edits(draw: st.DrawFn) -> Sampling:
    ids = st.integers(0, V - 1)
    few = st.integers(0, 3)
    biased = draw(st.dictionaries(ids, st.floats(-20, 20, width=32), max_size=3))
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7])),
        min_tokens=draw(st.integers(0, 3)),
        stop_ids=draw(st.frozensets(ids, max_size=3)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5])),
        logit_bias=tuple(biased.items()),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=10, max_size=40).map(tuple)),
        bad_words_ids=tuple(draw(st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=3))),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
    )


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=200, deadline=None)
@given(params=st.lists(edits(), min_size=1, max_size=5), seed=st.integers(0, 10**6), again=st.integers(0, 3))
def test_several_steps_follow_the_rules(path: str, params: list[Sampling], seed: int, again: int) -> None:
    """Greedy rows take the best by the slow rules; others something possible; a step launched again changes nothing."""
    sampler = make(path)
    prompts = [[3, 1, V + 5, 2][: 1 + b % 4] for b in range(len(params))]
    outputs: list[list[int]] = [[] for _ in params]
    rows = list(range(len(params)))[::-1]
    for row in rows:
        # One token was generated before, as after a preemption.
        outputs[row] = [row % 4]
        sampler.admit(row, params[row], [*prompts[row], *outputs[row]], len(prompts[row]))
    for step in range(4):
        # Few likely tokens, so that they repeat and complete bad words.
        logits_BV = logits(len(rows), seed + step)
        logits_BV[:, :4] += 6
        before = logits_BV.clone()
        lengths = [len(prompts[row]) + len(outputs[row]) for row in rows]
        out = sampler.sample(logits_BV, rows, lengths)
        sampler.append(rows, out.ids_B)
        if step == again:
            repeated = sampler.sample(logits_BV, rows, lengths)
            assert torch.equal(repeated.ids_B, out.ids_B)
            sampler.append(rows, out.ids_B)
        assert torch.equal(logits_BV, before)
        for b, row in enumerate(rows):
            wanted_V = edited(logits_BV[b], params[row], prompts[row], outputs[row])
            token = int(out.ids_B[b])
            assert bool(out.nan_B[b]) == (not wanted_V.isfinite().any())
            if params[row].greedy and not out.nan_B[b]:
                assert wanted_V[token] >= wanted_V.max() - 1e-4
            elif not out.nan_B[b]:
                assert wanted_V[token] > -math.inf
            outputs[row].append(token)


@st.composite
def any_params(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
        seed=draw(st.integers(0, 5)),
        logprobs=draw(st.sampled_from([None, 2])),
    )


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), own=any_params(), mates=st.lists(any_params(), max_size=6))
def test_a_request_is_alone_with_its_seed(path: str, data: st.DataObject, own: Sampling, mates: list[Sampling]) -> None:
    """The same tokens whatever shares the batch, whatever the row, whatever the place in the batch."""
    steps = [logits(1, 77 + step)[0] for step in range(5)]
    alone = make(path)
    alone.admit(3, own, [1, 2, 3], 3)
    wanted = []
    for step, logits_V in enumerate(steps):
        out = alone.sample(logits_V[None], [3], [3 + step])
        alone.append([3], out.ids_B)
        wanted.append(int(out.ids_B))
    sampler = make(path)
    rows = data.draw(st.permutations(range(8)))[: len(mates) + 1]
    row = rows[data.draw(st.integers(0, len(mates)))]
    others = iter(mates)
    for other in rows:
        sampler.admit(other, own if other == row else next(others), [1, 2, 3], 3)
    got = []
    for step, logits_V in enumerate(steps):
        batch = data.draw(st.permutations(rows))
        if step == 2 and len(rows) > 1:
            gone = next(other for other in batch if other != row)
            sampler.release(gone)
            rows = [other for other in rows if other != gone]
            batch = rows
        logits_BV = logits(len(batch), step)
        logits_BV[batch.index(row)] = logits_V
        out = sampler.sample(logits_BV, batch, [3 + step] * len(batch))
        sampler.append(batch, out.ids_B)
        got.append(int(out.ids_B[batch.index(row)]))
    assert got == wanted


def test_seed_and_position_both_matter() -> None:
    flat = torch.zeros(1, 5000)
    sampler = make(vocab_size=5000)
    drawn = {}
    for seed in (1, 2):
        sampler.admit(0, Sampling(temperature=1.0, seed=seed), [1], 1)
        for length in range(1, 41):
            drawn[seed, length] = int(sampler.sample(flat, [0], [length]).ids_B)
    assert len(set(drawn.values())) > 70


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "min_p": 0.02, "top_p": 0.95, "top_k": 12},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(path: str, params: dict[str, Any]) -> None:
    logits_V = logits(1, 5, spread=1.5)[0]
    num_draws = 6000
    counts = np.zeros(V)
    wanted = probabilities(edited(logits_V, Sampling(**params), [1, 2, 3], []), Sampling(**params)).numpy()
    sampler = make(path, rows=200)
    for row in range(200):
        sampler.admit(row, Sampling(**params, seed=row), [1, 2, 3], 3)
    for position in range(num_draws // 200):
        ids_B = sampler.sample(logits_V.expand(200, V).contiguous(), range(200), [3 + position] * 200).ids_B
        counts += np.bincount(ids_B.numpy(), minlength=V)
    assert counts[wanted == 0].sum() == 0
    frequent = wanted * num_draws >= 5
    seen = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(wanted[frequent], wanted[~frequent].sum()) * num_draws
    seen, expected = seen[expected > 0], expected[expected > 0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    degrees = len(seen) - 1
    assert (statistic - degrees) / math.sqrt(2 * degrees) < 4


@pytest.mark.parametrize("path", PATHS)
def test_a_large_vocabulary_is_drawn_evenly(path: str) -> None:
    """With many equal candidates the winner's noise is tiny: it must not run out of bits."""
    size = 60_000
    sampler = make(path, vocab_size=size, rows=1)
    ids = []
    for seed in range(400):
        sampler.admit(0, Sampling(temperature=1.0, seed=seed), [1], 1)
        ids.append(int(sampler.sample(torch.zeros(1, size), [0], [1]).ids_B))
    assert len(set(ids)) > 390
    assert np.mean(ids) == pytest.approx(size / 2, rel=0.12)


def test_mixed_batch_with_mask_keeps_greedy_rows_greedy() -> None:
    sampler = make()
    sampler.admit(0, Sampling(), [1], 1)
    sampler.admit(1, Sampling(temperature=1.0, top_k=1), [1], 1)
    sampler.admit(2, Sampling(temperature=1.0), [1], 1)
    logits_BV = logits(3)
    assert sampler.sample(logits_BV, [0, 1, 2], [1, 1, 1]).ids_B[:2].tolist() == logits_BV[:2].argmax(-1).tolist()
    bytes_MW = torch.zeros(2, 16, dtype=torch.uint8)
    bytes_MW[:, 37 // 8] = 1 << 37 % 8
    for places, want in (
        ([1, 2], [int(logits_BV[0].argmax()), 37, 37]),
        ([2, 0], [37, int(logits_BV[1].argmax()), 37]),
    ):
        masks = Masks(torch.tensor(places), bytes_MW)
        assert sampler.sample(logits_BV, [0, 1, 2], [1, 1, 1], masks).ids_B.tolist() == want


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("other", [Sampling(), Sampling(temperature=1.0), Sampling(repetition_penalty=1.1, logprobs=1)])
def test_broken_rows_are_told_and_hurt_no_other(path: str, other: Sampling) -> None:
    sampler = make(path)
    for row in range(5):
        sampler.admit(row, other if row % 2 else Sampling(temperature=0.5, top_p=0.9, logprobs=1), [1, 2], 2)
    rows, lengths = list(range(5)), [2] * 5
    sound = sampler.sample(logits(5), rows, lengths)
    assert not sound.nan_B.any()
    logits_BV = logits(5)
    logits_BV[0, 7] = math.nan
    logits_BV[1] = -math.inf
    logits_BV[3, 0] = math.nan
    out = sampler.sample(logits_BV, rows, lengths)
    assert out.nan_B.tolist() == [True, True, False, True, False]
    assert out.ids_B[out.nan_B].tolist() == [0, 0, 0]
    assert out.ids_B[[2, 4]].tolist() == sound.ids_B[[2, 4]].tolist()
    assert set(out.to_host()) == {2, 4}


def told(out: SampleOutput) -> dict[int, tuple[Any, ...]]:
    return {row: dataclasses.astuple(entry) for row, entry in out.to_host().items()}


def test_what_is_copied_stays_when_the_next_step_overwrites_it() -> None:
    """The ids and flags of a decode graph lie in memory that its next replay writes."""
    sampler = make()
    for row in range(2):
        sampler.admit(row, Sampling(logprobs=2), [1, 2], 2)
    place = greedy(logits(2))
    out = sampler.sample(logits(2), [0, 1], [2, 2], None, place)
    assert out.nan_B is place[1], "nothing would be overwritten: the test cannot fail"
    want, kept = told(out), out.start_copy()
    assert out.logprobs is not None
    with torch.inference_mode():
        for tensor in (*place, *out.logprobs._columns()):
            tensor.fill_(1)
    assert (kept.ids_B.tolist(), kept.nan_B.tolist()) == ([want[0][0], want[1][0]], [False, False])
    assert told(kept) == want


def test_masked_logits_of_the_model_are_no_fault() -> None:
    logits_V = logits(1)[0]
    logits_V[::2] = -math.inf
    assert one(Sampling(), logits_V) == int(logits_V.argmax())
    assert one(Sampling(temperature=1.0, top_p=0.9), logits_V) % 2 == 1


def test_nothing_left_is_a_broken_row() -> None:
    sampler = make()
    sampler.admit(0, Sampling(allowed_token_ids=(5,), stop_ids=frozenset({5}), min_tokens=2), [1], 1)
    assert sampler.sample(logits(1), [0], [1]).nan_B.tolist() == [True]
    sound = sampler.sample(logits(1), [0], [3])
    assert (sound.ids_B.tolist(), sound.nan_B.tolist()) == ([5], [False])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = make()
    wants = {4: 3, 1: 0, 2: None}
    for row, k in wants.items():
        params = Sampling(temperature=0.1, repetition_penalty=2.0, logit_bias=((9, 50.0),), logprobs=k)
        sampler.admit(row, params, [9, 5], 2)
    logits_BV = logits(3)
    raw_BV = logits_BV.log_softmax(-1)
    out = sampler.sample(logits_BV, list(wants), [2, 2, 2])
    assert out.ids_B.tolist() == [9, 9, 9]
    host = out.to_host()
    assert set(host) == {4, 1}
    for b, (row, k) in enumerate(wants.items()):
        if k is None:
            continue
        entry = host[row]
        assert entry.token_id == 9
        assert entry.logprob == pytest.approx(raw_BV[b, 9].item(), abs=1e-5)
        assert entry.rank == 1 + int((raw_BV[b] > raw_BV[b, 9]).sum())
        best = raw_BV[b].topk(k)
        assert list(entry.top_ids) == best.indices.tolist()
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_named_tokens_take_the_places_of_the_best() -> None:
    """Rows that name tokens, and rows that do not, are reported in one batch."""
    sampler = make()
    names = {4: (7, 0, 3), 1: (), 2: (5,)}
    for row, ids in names.items():
        sampler.admit(row, Sampling(logprobs=len(ids) or 2, logprob_ids=ids), [9, 5], 2)
    logits_BV = logits(3)
    raw_BV = logits_BV.log_softmax(-1)
    host = sampler.sample(logits_BV, list(names), [2, 2, 2]).to_host()
    for b, (row, ids) in enumerate(names.items()):
        expected = list(ids) or raw_BV[b].topk(2).indices.tolist()
        assert list(host[row].top_ids) == expected
        assert host[row].top_logprobs == pytest.approx(raw_BV[b, expected].tolist(), abs=1e-5)


def test_all_tokens_of_the_vocabulary() -> None:
    sampler = make()
    sampler.admit(0, Sampling(logprobs=V), [1], 1)
    logits_BV = logits(1)
    (entry,) = sampler.sample(logits_BV, [0], [1]).to_host().values()
    assert sorted(entry.top_ids) == list(range(V))
    assert entry.top_logprobs == pytest.approx(sorted(logits_BV.log_softmax(-1)[0].tolist(), reverse=True), abs=1e-5)


def test_bfloat16_logits_are_reported_and_chosen_in_float32() -> None:
    sampler = make()
    sampler.admit(0, Sampling(logprobs=2), [1], 1)
    logits_BV = logits(1).bfloat16()
    out = sampler.sample(logits_BV, [0], [1])
    raw_V = logits_BV.float().log_softmax(-1)[0]
    assert out.ids_B.tolist() == [int(raw_V.argmax())]
    assert out.to_host()[0].logprob == pytest.approx(raw_V.max().item(), abs=1e-6)


def test_prompt_logprobs() -> None:
    logits_TV = logits(150)
    targets_T = torch.arange(150) % V
    entries = [*make().prompt_logprobs(logits_TV, targets_T, 2)]
    raw_TV = logits_TV.log_softmax(-1)
    assert [entry.token_id for entry in entries] == targets_T.tolist()
    assert [entry.logprob for entry in entries] == pytest.approx(raw_TV[range(150), targets_T].tolist(), abs=1e-5)
    assert [list(entry.top_ids) for entry in entries] == raw_TV.topk(2).indices.tolist()
    assert len(make().prompt_logprobs(logits_TV[:0], targets_T[:0], 1)) == 0


def test_logits_processors_of_both_forms() -> None:
    seen: list[tuple[list[int], ...]] = []

    def short(output: list[int], logits_V: Tensor) -> Tensor:
        seen.append((list(output),))
        logits_V[:50] = -math.inf
        return logits_V

    class Long:
        def __call__(self, prompt: list[int], output: list[int], logits_V: Tensor) -> Tensor:
            seen.append((list(prompt), list(output)))
            output.clear()
            forced = torch.full_like(logits_V, -math.inf)
            forced[60 + len(seen) // 2] = math.inf
            return forced

    sampler = make()
    sampler.admit(0, Sampling(processors=(short, Long())), [4, 5, 6], 2)
    sampler.admit(1, Sampling(temperature=1.0, processors=(short,)), [4], 1)
    logits_BV = logits(2)
    sampler.sample(logits_BV[:1], [0], [3])
    assert seen == [([6],), ([4, 5], [6])]
    out = sampler.sample(logits_BV, [0, 1], [3, 1])
    assert out.ids_B[0] == 62
    assert out.ids_B[1] >= 50
    assert not out.nan_B.any()
    sampler.append([0, 1], out.ids_B)
    seen.clear()
    sampler.sample(logits_BV, [0, 1], [4, 2])
    assert seen == [([6, 62],), ([4, 5], [6, 62]), ([int(out.ids_B[1])],)]
    # The step that gave token 62 is launched again.
    seen.clear()
    sampler.sample(logits_BV, [0, 1], [3, 1])
    assert seen == [([6],), ([4, 5], [6]), ([],)]


@pytest.mark.parametrize(
    "processor",
    [lambda output, logits_V, scale=2.0: logits_V * scale, lambda *both: both[1] * 2, torch.add],
    ids=["optional third", "any number", "built in"],
)
def test_other_ways_to_write_a_processor(processor: Callable[..., Tensor]) -> None:
    sampler = make()
    if processor is torch.add:  # tells no signature, so it is called with two arguments: add([], logits) fails
        sampler.admit(0, Sampling(processors=(processor,)), [1], 1)
        with pytest.raises(TypeError):
            sampler.sample(logits(1), [0], [1])
        return
    sampler.admit(0, Sampling(processors=(processor,)), [1], 1)
    assert sampler.sample(logits(1), [0], [1]).ids_B.tolist() == logits(1).argmax(-1).tolist()


def test_errors_of_processors_and_ids_are_the_users() -> None:
    sampler = make()
    for bad in (lambda a: a, lambda a, b, c, d: a):
        with pytest.raises(ParamsError, match="takes"):
            sampler.admit(0, Sampling(processors=(bad,)), [1], 1)
    sampler.admit(0, Sampling(processors=(lambda output, logits_V: logits_V[:5],)), [1], 1)
    with pytest.raises(ParamsError, match=r"shape \(5,\)"):
        sampler.sample(logits(1), [0], [1])
    with pytest.raises(ParamsError, match="allowed_token_ids"):
        sampler.admit(0, Sampling(allowed_token_ids=(1, V)), [1], 1)
    with pytest.raises(ParamsError, match="logit_bias"):
        sampler.admit(0, Sampling(logit_bias=((V, 1.0),)), [1], 1)


def test_stop_ids_beyond_the_logits_are_never_sampled_anyway() -> None:
    params = Sampling(stop_ids=frozenset({V + 7}), min_tokens=3, bad_words_ids=((V,), (1, V), (V + 1, 2)))
    assert one(params, logits(1)[0]) == int(logits(1).argmax())


def test_a_row_starts_anew_when_it_is_admitted_again() -> None:
    sampler = make()
    logits_BV = torch.zeros(1, V)
    logits_BV[0, 7] = 1.0
    params = Sampling(frequency_penalty=2.0)
    sampler.admit(0, params, [1], 1)
    out = sampler.sample(logits_BV, [0], [1])
    sampler.append([0], out.ids_B)
    assert int(out.ids_B) == 7
    assert int(sampler.sample(logits_BV, [0], [2]).ids_B) != 7
    for admit_again in (True, False):
        if not admit_again:
            sampler.release(0)
            sampler.release(0)
        sampler.admit(0, params, [1], 1)
        assert int(sampler.sample(logits_BV, [0], [1]).ids_B) == 7


def test_index_tensors_are_kept_while_the_batch_stays_the_same() -> None:
    sampler = make()
    table = sampler._rows
    params = Sampling(temperature=1.0, top_p=0.5, min_tokens=2, stop_ids=frozenset({3}))
    for row in (0, 1):
        sampler.admit(row, params, [1], 1)
    first = table.compose([0, 1], [1, 1])
    assert table.compose([0, 1], [2, 2]) is first
    grown = table.compose([0, 1], [2, 3])
    assert grown is not first
    assert grown.edits is not None
    assert table.compose([1, 0], [3, 3]).edits is None
    sampler.admit(1, params, [1, 1], 2)
    assert table.compose([1, 0], [3, 3]).edits is not None


def test_a_token_is_counted_once_whatever_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is short while a prompt is counted, and again while a token is: the step is launched again."""
    sampler = make(PATHS[0])
    params = Sampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2)
    penalties = sampler._rows.penalties

    def short(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for failing in (torch.full, torch.zeros):
        with monkeypatch.context() as patch:
            patch.setattr(torch, failing.__name__, short)
            with pytest.raises(torch.OutOfMemoryError):
                sampler.admit(0, params, [1, 2], 2)
    assert not penalties._counted or len(penalties._free) == len(penalties._counted), "slots are lost"
    sampler.admit(0, params, [1, 2], 2)
    logits_BV = logits(1, 5)
    once = sampler.sample(logits_BV, [0], [2]).ids_B
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", short)
        with pytest.raises(torch.OutOfMemoryError):
            sampler.append([0], once)
    for _ in range(2):
        assert torch.equal(sampler.sample(logits_BV, [0], [2]).ids_B, once)
        sampler.append([0], once)
    counts_V = penalties._counts_SV[0]
    assert counts_V[once].item() == 2, "generated once"
    assert int(counts_V.sum()) == 2 + 2, "and each of the prompt's tokens seen"


def test_reports_of_a_prompt_are_kept_as_columns() -> None:
    """An object for each position took 1.4 KB: 64 prompts of 8,000 tokens, 700 MB."""
    logits_TV, targets_T = logits(250), torch.arange(250) % V
    make().prompt_logprobs(logits_TV, targets_T, 5)
    tracemalloc.start()
    try:
        parts = [make().prompt_logprobs(logits_TV, targets_T, 5) for _ in range(8)]
        kept = PromptLogprobs.joined(parts)
        del parts
        assert tracemalloc.get_traced_memory()[0] < 2000 * 80
    finally:
        tracemalloc.stop()
    assert len(kept) == 2000
    whole = [one.token_id for one in kept]
    assert whole == targets_T.tolist() * 8
    assert [one.token_id for one in kept.since(1990)] == whole[1990:]
    assert [*PromptLogprobs.joined([])] == []
    with pytest.raises(ValueError, match="length"):
        dataclasses.replace(kept, ranks=kept.ranks[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_first_of_the_best_and_broken_ones_none(dtype: torch.dtype) -> None:
    logits_BV = logits(7).to(dtype)
    logits_BV[1, [70, 20, 90]] = 50.0
    logits_BV[2, 3] = math.nan
    logits_BV[3] = -math.inf
    logits_BV[4, 5] = math.inf
    logits_BV[5, : V - 1] = -math.inf
    before = logits_BV.clone()
    # Also of a part of a tensor, whose rows are not next to each other.
    for given_BV in (logits_BV, torch.cat([logits_BV, logits_BV], dim=1)[:, :V]):
        ids_B, nan_B = greedy(given_BV)
        assert nan_B.tolist() == [False, False, True, True, True, False, False]
        assert ids_B.tolist() == [int(before[0].argmax()), 20, 0, 0, 0, V - 1, int(before[6].argmax())]
        assert (ids_B.dtype, nan_B.dtype) == (torch.int64, torch.bool)
    assert torch.equal(logits_BV.nan_to_num(), before.nan_to_num())


def test_tokens_are_kept_of_rows_whose_choices_depend_on_them_alone() -> None:
    sampler = make()
    sampler.admit(0, Sampling(), (1, 2), 2)
    sampler.admit(1, Sampling(logit_bias=((3, 1.0),)), (1, 2), 2)
    sampler.admit(2, Sampling(frequency_penalty=2.0), (1, 2), 2)
    plain = sampler._rows.compose([0, 1], [2, 2])
    assert not plain.keeps_tokens
    best = 9
    logits_3V = torch.zeros(3, V)
    logits_3V[:, best] = 1.0
    logits_3V[:, best + 1] = 0.5
    for length, wanted in ((2, [best] * 3), (3, [best, best, best + 1])):
        out = sampler.sample(logits_3V, [0, 1, 2], [length] * 3)
        assert out.ids_B.tolist()[0::2] == wanted[0::2]
        sampler.append([0, 1, 2], out.ids_B)


@pytest.mark.case(144)
def test_nearly_a_whole_vocabulary_is_allowed_in_a_moment() -> None:
    """Edits are made anew whenever a row comes or goes: 32 such rows kept the engine for 1.6 s each time."""
    params = [Sampling(seed=1, temperature=0.0, max_tokens=1, allowed_token_ids=tuple(range(150_000)))] * 8

    def spent_s(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    def made() -> None:
        found = filters.edits(params, [(False, False)] * 8, 151_936, torch.device("cpu"))
        assert found is not None
        assert found.allowed is not None
        assert len(found.allowed[2]) == 8 * 150_000

    def looked_at() -> list[int]:
        return [token for row in params for token in row.allowed_token_ids or ()]

    # A pair of each id takes ten times as long as to look at it; what else runs makes both slower.
    assert min(spent_s(made) for _ in range(3)) < 3 * min(spent_s(looked_at) for _ in range(3))
