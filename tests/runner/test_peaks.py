"""What the KV cache must leave for a step: each part by hand, and the sampling that is run to measure it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld.runner import build, graphs, peaks
from beheld.sample.sampler import Sampler
from tests.inputs import pipes

MIB = 1 << 20


def test_phases_follow_one_another_and_what_is_kept_does_not() -> None:
    found = peaks.Peaks(text=100, tower=300, sampling=200, kept=7000, graphs=100)
    assert found.reserved_bytes == 440 + 7000 + (1 << 30)


@pytest.mark.parametrize("captures", [False, True])
def test_parts_are_those_of_the_options(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    info = pipes.info("llava")
    config = pipes.config(info, max_num_batched_tokens=512, max_num_seqs=8)
    ran: list[Any] = []

    def peak(run: Any) -> tuple[int, int]:
        run()
        return (64 * MIB, 0) if len(ran) == 1 else (24 * MIB, 3 * MIB)

    monkeypatch.setattr(peaks, "_peak", peak)
    monkeypatch.setattr(peaks, "sample_full_batch", lambda *given: ran.append("sampling"))
    device = torch.device("cpu")
    probe = SimpleNamespace(dry_run=lambda tokens: ran.append(tokens), sampler=None)
    adapter = SimpleNamespace(device=device, embed=lambda ids_T: torch.zeros(1, 96))
    found = peaks.measure(probe, adapter, info, config, 512, captures=captures)  # type: ignore[arg-type]
    assert ran == [512, "sampling"]
    assert (found.text, found.sampling) == (64 * MIB, 24 * MIB)
    # A tower call is as large whatever a step is.
    assert found.tower == 64 * MIB * 32
    rows = sum(graphs.ladder(8)) + 8
    logits = rows * info.vocab_size * 4 if captures else 0
    assert found.kept == 3 * MIB + config.max_encoder_tokens * 96 * 4 + logits
    assert found.graphs == (64 * MIB if captures else 0)


def test_many_rows_share_one_place() -> None:
    info = pipes.info("llava")
    own = [size for size in graphs.ladder(512) if size <= 512]
    config = pipes.config(info, max_num_batched_tokens=8192, max_num_seqs=2048, max_loras=2)
    assert peaks.graph_rows(config) == 2 * sum(own) + 2048 + 2048


def test_adapters_have_decode_graphs_of_their_own() -> None:
    info = pipes.info("llava")
    plain, lora = (pipes.config(info, max_num_batched_tokens=16, max_num_seqs=8, max_loras=n) for n in (0, 2))
    assert peaks.graph_rows(plain) == sum(graphs.ladder(8))
    assert peaks.graph_rows(lora) == 2 * sum(graphs.ladder(8))


def test_sampling_that_is_measured_leaves_the_rows_free() -> None:
    device = torch.device("cpu")
    sampler = Sampler(4, 50, device)
    for _ in range(2):
        peaks.sample_full_batch(sampler, 4, 50, torch.bfloat16, device)
    plain = Sampler(4, 50, device)
    logits_BV = torch.randn(1, 50)
    from beheld.core.params import Sampling

    for each in (sampler, plain):
        each.admit(3, Sampling(), (1, 2), 2)
    assert torch.equal(sampler.sample(logits_BV, [3], [2]).ids_B, plain.sample(logits_BV, [3], [2]).ids_B)


@pytest.mark.parametrize(("length", "tokens"), [(1, 1), (2, 1), (300, 299), (5000, 512)])
def test_the_step_that_is_measured_is_the_largest_that_there_can_be(
    length: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = pipes.info("llava")
    config = pipes.config(info, max_model_len=length, max_num_batched_tokens=512)
    measured: list[int] = []

    def measure(*given: Any, captures: bool) -> peaks.Peaks:
        measured.append(given[-1])
        return peaks.Peaks(0, 0, 0, 5, 0)

    monkeypatch.setattr(build, "ModelRunner", lambda *given: None)
    monkeypatch.setattr(peaks, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert build._activation_bytes(None, None, None, info, config) == 5 + (1 << 30)  # type: ignore[arg-type]
    assert measured == [tokens]
