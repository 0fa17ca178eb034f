"""What the KV cache must leave for a step: each part by hand, and the sampling that is run to measure it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beheld import LLM, SamplingParams
from beheld.models import call_graphs
from beheld.runner import build, graphs, memory_profile
from beheld.sample.sampler import Sampler
from tests import tiny
from tests.inputs import pipes

MIB = 1 << 20


def test_phases_follow_one_another_and_what_is_kept_does_not() -> None:
    found = memory_profile.MemoryProfile(text=100, tower=300, sampling=200, kept=7000, graphs=100)
    assert found.reserved_bytes == 440 + 7000 + (1 << 30)


@pytest.mark.parametrize("captures", [False, True])
def test_parts_are_those_of_the_options(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    info = pipes.info("llava")
    config = pipes.config(info, max_num_batched_tokens=512, max_num_seqs=8)
    ran: list[Any] = []

    def peak(platform: Any, run: Any) -> tuple[int, int]:
        run()
        return (64 * MIB, 0) if len(ran) == 1 else (24 * MIB, 3 * MIB)

    monkeypatch.setattr(memory_profile, "_peak", peak)
    monkeypatch.setattr(memory_profile, "sample_full_batch", lambda *given: ran.append("sampling"))
    device = torch.device("cpu")
    probe = SimpleNamespace(dry_run=lambda lengths: ran.append(lengths), sampler=None)
    adapter = SimpleNamespace(device=device, embed=lambda ids_T: torch.zeros(1, 96))
    found = memory_profile.measure(probe, adapter, info, config, captures=captures)  # type: ignore[arg-type]
    assert ran == [[512], "sampling"]
    assert (found.text, found.sampling) == (64 * MIB, 24 * MIB)
    # A tower call is as large whatever a step is.
    assert found.tower == 64 * MIB * 32
    rows = sum(graphs.ladder(8)) + 8
    # What graphs of tower calls take in and give, and in their pools the inside of a step and of a tower call.
    logits = rows * info.vocab_size * 4 + call_graphs.KEPT_BYTES if captures else 0
    assert found.kept == 3 * MIB + config.max_encoder_tokens * 96 * 4 + logits
    assert found.graphs == (64 * MIB + found.tower if captures else 0)


def test_many_rows_share_one_place() -> None:
    info = pipes.info("llava")
    own = [size for size in graphs.ladder(512) if size <= 512]
    config = pipes.config(info, max_num_batched_tokens=8192, max_num_seqs=2048, max_loras=2)
    sharing = 16 + 32 + 64 + 128 + 256 + 512
    assert memory_profile.graph_rows(config) == 2 * sum(own) + sharing + 2048 + 2048


def test_adapters_have_decode_graphs_of_their_own() -> None:
    info = pipes.info("llava")
    plain, lora = (pipes.config(info, max_num_batched_tokens=16, max_num_seqs=8, max_loras=n) for n in (0, 2))
    assert memory_profile.graph_rows(plain) == sum(graphs.ladder(8))
    assert memory_profile.graph_rows(lora) == 2 * sum(graphs.ladder(8))


def test_sampling_that_is_measured_leaves_the_rows_free() -> None:
    device = torch.device("cpu")
    sampler = Sampler(4, 50, device)
    for _ in range(2):
        memory_profile.sample_full_batch(sampler, 4, 50, torch.bfloat16, device)
    plain = Sampler(4, 50, device)
    logits_BV = torch.randn(1, 50)
    from beheld.core.sampling import Sampling

    for each in (sampler, plain):
        each.admit(3, Sampling(), (1, 2), 2)
    assert torch.equal(sampler.sample(logits_BV, [3], [2]).ids_B, plain.sample(logits_BV, [3], [2]).ids_B)


@pytest.mark.parametrize(
    ("length", "rows", "lengths"),
    [
        (1, 600, [1] * 512),
        (2, 8, [1] * 8),
        (300, 8, [299, 213]),
        (300, 1, [299]),
        (101, 64, [100] * 5 + [12]),
        (5000, 8, [512]),
    ],
)
def test_the_step_that_is_measured_is_the_largest_that_there_can_be(length: int, rows: int, lengths: list[int]) -> None:
    config = pipes.config(pipes.info("llava"), max_model_len=length, max_num_batched_tokens=512, max_num_seqs=rows)
    assert memory_profile.fullest_step(config) == lengths


def test_what_was_measured_is_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    info = pipes.info("llava")
    monkeypatch.setattr(build, "ModelRunner", lambda *given: None)
    monkeypatch.setattr(memory_profile, "measure", lambda *given, captures: memory_profile.MemoryProfile(0, 0, 0, 5, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    adapter: Any = SimpleNamespace(info=info)
    assert build._activation_bytes(adapter, (None, None), pipes.config(info)) == 5 + (1 << 30)


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "mllama"])
def test_a_dry_run_of_many_sequences_leaves_rows_and_answers_as_they_were(family: str) -> None:
    prompt = {"prompt_token_ids": [*range(200, 230)]}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "seed": 0, "max_num_seqs": 3, "media_workers": 0}
    with LLM(str(tiny.checkpoint(family)), max_model_len=40, max_num_batched_tokens=100, **options) as llm:
        runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
        (before,) = llm.generate([prompt], params, use_tqdm=False)
        logits_SV, context = runner.dry_run(memory_profile.fullest_step(runner.config))
        assert len(logits_SV) == 3
        assert context.metadata.lengths == (39, 39, 22)
        assert set(context.called.values()) == {1}
        assert not any(layer.keys[0].any() for layer in runner.kv.values())
        (after,) = llm.generate([prompt], params, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
