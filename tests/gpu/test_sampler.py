"""On a GPU the sampler chooses what it chooses on a CPU, and never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from beheld.core.sampling import LogprobsMode, Sampling
from beheld.sample.filters import Masks
from beheld.sample.sampler import Sampler, greedy

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")

V = 5003
KINDS = {
    "greedy": [Sampling()],
    "temperature": [Sampling(temperature=1.0, seed=3), Sampling(temperature=0.3, seed=4)],
    "filters": [
        Sampling(temperature=1.0, top_k=20, seed=1),
        Sampling(temperature=1.0, top_p=0.9, seed=2),
        Sampling(temperature=1.0, min_p=0.05, seed=3),
        Sampling(temperature=0.7, top_k=50, top_p=0.8, seed=4),
    ],
    "edits": [
        Sampling(logit_bias=((5, 3.0),), bad_words_ids=((1,), (2, 3), (2, 4))),
        Sampling(allowed_token_ids=(1, 2, 3, 4, 9), min_tokens=3, stop_ids=frozenset({4})),
        Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=3),
        Sampling(bad_words_ids=((5, 2, 3), (2, 2)), no_repeat_ngram=3),
        Sampling(no_repeat_ngram=2, max_tokens=40),
    ],
    "modes": [
        Sampling(
            temperature=temperature, top_k=9, top_p=0.9, seed=5, logit_bias=((5, 3.0),), logprobs=3, logprobs_mode=mode
        )
        for mode in LogprobsMode
        for temperature in (0.0, 0.8)
    ],
}
KINDS["mixed"] = [params for kind in list(KINDS.values()) for params in kind]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_same_choices_without_waiting(kind: str) -> None:
    params = KINDS[kind]
    rows = list(range(len(params)))
    tokens = {}
    for device in ("cpu", "cuda"):
        sampler = Sampler(len(rows), V, torch.device(device))
        chosen = []
        # All but 32 tokens.
        allowed_MW = torch.full((len(rows), -(-V // 8)), 255, dtype=torch.uint8)
        allowed_MW[:, 100:104] = 0
        masks = Masks(torch.arange(len(rows)).to(device), allowed_MW.to(device))
        steps = [torch.randn(len(rows), V, generator=torch.Generator().manual_seed(s)) * 2 for s in range(6)]
        for step in steps:
            step[:, :10] += 6
        steps = [step.to(device) for step in steps]
        if device == "cuda":
            torch.cuda.synchronize()
        with no_waiting():
            for row in rows:
                sampler.admit(row, params[row], [7, 8, 9], 3)
            for step, logits_BV in enumerate(steps):
                out = sampler.sample(logits_BV, rows, [3 + step] * len(rows), masks if step % 2 else None)
                sampler.append(rows, out.ids_B)
                chosen.append(out)
        tokens[device] = [out.ids_B.tolist() for out in chosen]
        assert not any(out.nan_B.any().item() for out in chosen)
    assert tokens["cpu"] == tokens["cuda"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.9, 5.0])
def test_a_row_alone_is_drawn_as_among_many_and_as_on_a_cpu(spread: float, dtype: torch.dtype) -> None:
    """Alone it has many programs that wait for one another; among many it has one."""
    vocab_size, most = 151_936, 96
    kinds = [
        {},
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"top_k": 50},
        {"top_k": 3000, "top_p": 0.9},
        {"min_p": 0.01, "top_p": 0.8},
    ]
    params = [Sampling(temperature=0.8, seed=row, **kinds[row % len(kinds)]) for row in range(most)]
    logits_BV = torch.randn(most, vocab_size, generator=torch.Generator().manual_seed(6)).to(dtype) * spread
    found: dict[str, list[int]] = {}
    for device, each in (("cuda", most), ("cuda", 1), ("cuda", 5), ("cpu", most)):
        sampler = Sampler(most, vocab_size, torch.device(device))
        placed_BV = logits_BV.to(device)
        for row in range(most):
            sampler.admit(row, params[row], [7, 8, 9], 3)
        ids = []
        for first in range(0, most, each):
            rows = list(range(first, min(first + each, most)))
            ids += sampler.sample(placed_BV[rows], rows, [3] * len(rows)).ids_B.tolist()
        found[f"{device} {each}"] = ids
    assert len(set(found["cpu 96"])) > 60
    assert {name: ids == found["cpu 96"] for name, ids in found.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("each", [1, 64])
def test_what_is_reported_of_a_draw_is_what_a_cpu_reports(dtype: torch.dtype, each: int) -> None:
    """Alone a row has many programs, among many it has one; both say which logits they have kept."""
    vocab_size, most = 20_011, 64
    kinds = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 300, "top_p": 0.9}, {"min_p": 0.01}]
    options = {"logprobs": vocab_size, "logprobs_mode": LogprobsMode.PROCESSED_LOGPROBS}
    params = [Sampling(temperature=0.8, seed=row, **options, **kinds[row % len(kinds)]) for row in range(most)]
    logits_BV = (torch.randn(most, vocab_size, generator=torch.Generator().manual_seed(7)) * 2).to(dtype)
    told: dict[str, list[torch.Tensor]] = {}
    for device, size in (("cuda", each), ("cpu", most)):
        sampler = Sampler(most, vocab_size, torch.device(device))
        for row in range(most):
            sampler.admit(row, params[row], [7, 8, 9], 3)
        found = []
        for first in range(0, most, size):
            rows = list(range(first, first + size))
            out = sampler.sample(logits_BV[rows].to(device), rows, [3] * size).to_host()
            for entry in out.values():
                columns_V = torch.zeros(vocab_size, dtype=torch.float64)
                columns_V[list(entry.top_ids)] = torch.tensor(entry.top_logprobs, dtype=torch.float64)
                assert entry.logprob == pytest.approx(columns_V[entry.token_id].item())
                assert entry.logprob > -torch.inf
                assert columns_V.exp().sum().item() == pytest.approx(1.0, abs=1e-4)
                found.append(columns_V)
        told[device] = found
    for ours, theirs in zip(told["cuda"], told["cpu"], strict=True):
        assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
        assert torch.allclose(ours.exp(), theirs.exp(), atol=1e-5)


def test_results_are_read_while_the_next_step_runs() -> None:
    sampler = Sampler(2, V, torch.device("cuda"))
    for row in range(2):
        sampler.admit(row, Sampling(logprobs=3), [7, 8, 9], 3)
    logits_BV = torch.randn(2, V, device="cuda")
    want = {row: entry.logprob for row, entry in sampler.sample(logits_BV, [0, 1], [3, 3]).to_host().items()}
    torch.cuda.synchronize()
    with no_waiting():
        out, ready = sampler.sample(logits_BV, [0, 1], [3, 3]).start_copy(), torch.cuda.Event()
        ready.record()
    torch.cuda._sleep(2_000_000_000)
    ready.synchronize()
    assert {row: entry.logprob for row, entry in out.to_host().items()} == want
    assert out.nan_B.tolist() == [False, False]
    assert not torch.cuda.current_stream().query(), "it has waited for what was launched behind it"
    torch.cuda.synchronize()


def test_the_best_of_very_many_rows() -> None:
    """More than the second axis of a launch can have."""
    rows = 1 << 17
    logits_BV = torch.zeros(rows, 5, device="cuda", dtype=torch.bfloat16)
    want_B = torch.arange(rows, device="cuda") % 5
    logits_BV.scatter_(1, want_B[:, None], 1.0)
    ids_B, broken_B = greedy(logits_BV)
    assert torch.equal(ids_B, want_B)
    assert not broken_B.any()
