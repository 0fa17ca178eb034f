"""Graphs of mixed steps in the whole engine, on a CPU: stand-ins compute again, in the same places, what they hold."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beheld import LLM, SamplingParams
from beheld.attention.backend import AttnMetadata, LayerKV, Sharing
from beheld.attention.torch_ref import TorchBackend
from beheld.runner import graphs, mixed_graphs
from beheld.runner.mixed_graphs import MixedGraphs, Size
from tests import tiny
from tests.oracle.cases import Ask
from tests.oracle.test_oracle import request
from tests.runner import test_graphs, test_mixed_graphs
from tests.runner.test_staging import Moment

ROWS = 12
# With and without pictures, positions of one axis and of three, sliding windows, pictures that are read both ways.
FAMILIES = ["llama", "qwen2_5_vl", "gemma3"]


class DeviceReader:
    """Attention that, as in a captured pass, knows nothing but what the device has: no number of the host's is read."""

    name = "device reader"
    captures_prefill = True
    stores_with_decodes = True
    sharing: Sharing | None = None
    delta = None

    def __init__(self) -> None:
        self._backend = TorchBackend()
        self._known: dict[int, AttnMetadata] = {}

    def begin(self, metadata: AttnMetadata) -> None:
        """Nothing is read before the layers run."""
        if not metadata.stored:
            self._known.clear()

    def outside_graphs(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """Every step may be a graph's."""
        return False

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """As the reference, of tokens that belong to a sequence."""
        known = self._read(metadata)
        count = int(known.cu_q_B1[-1])
        self._backend.store(k_TKC[:count], v_TKC[:count], kv, known)
        kv.keys[0].zero_()
        kv.values[0].zero_()

    def _read(self, metadata: AttnMetadata) -> AttnMetadata:
        known = self._known.get(id(metadata))
        if known is None:
            known = self._known[id(metadata)] = _read(metadata)
            self._backend.begin(known)
        return known

    def attend(
        self,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        kv: LayerKV,
        metadata: AttnMetadata,
        scale: float,
        softcap: float | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """As the reference; of tokens that belong to no sequence, NaN, which nobody may see."""
        known = self._read(metadata)
        count = int(known.cu_q_B1[-1])
        out_THC = torch.full((*q_THC.shape[:2], v_TKC.shape[2]), float("nan"))
        if not count:
            # The first pass of all, when nothing lies in place yet.
            return out_THC
        out_THC[:count] = self._backend.attend(
            q_THC[:count], k_TKC[:count], v_TKC[:count], kv, known, scale, softcap, sinks_H
        )
        # Kernels leave the null block as it is.
        kv.keys[0].zero_()
        kv.values[0].zero_()
        return out_THC


def _read(metadata: AttnMetadata) -> AttnMetadata:
    """The same without the sequences that only pad it."""
    counts, lengths = metadata.cu_q_B1.diff().tolist(), metadata.lengths_B.tolist()
    live = [b for b, count in enumerate(counts) if count]
    starts = [lengths[b] - counts[b] for b in live]
    if metadata.starts_B is not None:
        assert metadata.starts_B[live].tolist() == starts
        assert any(metadata.starts) or not any(starts), "a prefix in a graph that is made for none"
    count = sum(counts)
    for group in metadata.groups:
        assert not group.slots_T[count:].any(), "padding writes nothing that counts"
    return dataclasses.replace(
        metadata,
        starts=tuple(starts),
        lengths=tuple(lengths[b] for b in live),
        cu_q_B1=torch.tensor([0, *(counts[b] for b in live)]).cumsum(0),
        groups=tuple(
            dataclasses.replace(group, slots_T=group.slots_T[:count], tables_BN=group.tables_BN[live], extra={})
            for group in metadata.groups
        ),
        # What is kept dense beside the cache counts on every step being its own.
        sequences=(),
    )


def equip(llm: LLM) -> MixedGraphs:
    """Let an engine on a CPU capture what it would on a GPU."""
    runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
    runner._backend = DeviceReader()
    # Towers have tests of their own.
    runner._adapter.capture_calls = lambda: None
    runner.capture_graphs()
    assert runner._graphs is not None
    made: MixedGraphs = runner._mixed_graphs
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM, LLM, Counter[Size]]]:
    """The family, an engine without graphs, one with them whose steps overlap, and what this one replayed."""
    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": ROWS, "max_num_batched_tokens": 200}
    options |= {"block_size": 4, "num_gpu_blocks_override": 800, "dtype": "float32", "seed": 0, "media_workers": 0}
    path = str(tiny.checkpoint(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", test_graphs.capture)
        patch.setattr(mixed_graphs, "capture", test_mixed_graphs.capture)
        # Graphs of all kinds in a small engine: with sequences that decode apart, and without prefixes.
        patch.setattr(mixed_graphs, "_FEW", 4)
        # Small steps have no tail, large ones do.
        patch.setattr(mixed_graphs, "FEWEST_ON_GPU", 100)
        patch.setattr(mixed_graphs, "_PLAIN", (64, 200))
        with LLM(path, **options) as plain, LLM(path, async_scheduling=True, **options) as quick:
            taken: Counter[Size] = Counter()
            for size, (graph, _) in equip(quick)._graphs.items():
                patch.setattr(graph, "_step", _counted(graph._step, size, taken))  # type: ignore[attr-defined]
            yield request.param, plain, quick, taken


def _counted(step: Any, size: Size, taken: Counter[Size]) -> Any:
    def run(wanted: Size) -> Any:
        taken[size] += 1
        return step(wanted)

    return run


def prompts_of(family: str, chance: np.random.Generator, count: int) -> list[Any]:
    """Of many lengths, some with beginnings in common, some longer than a step; in between, pictures."""
    shared = chance.integers(10, 60, size=90).tolist()
    made: list[Any] = []
    for n in range(count):
        own = chance.integers(10, 60, size=int(chance.integers(2, 130 if n % 3 else 20))).tolist()
        made.append({"prompt_token_ids": (shared[: int(chance.integers(1, 90))] if n % 4 == 0 else []) + own})
        if family != "llama" and n % 5 == 1:
            pixels = tiny.picture(56, 56, n % 3)
            made[-1] = {"prompt": tiny.prompt(family, 1, 0, "Hi?" * (n % 4)), "multi_modal_data": {"image": pixels}}
    return made


def test_a_crowd_s_answers_are_those_without_graphs(engines: tuple[str, LLM, LLM, Counter[Size]]) -> None:
    family, plain, quick, taken = engines
    chance = np.random.default_rng(3)
    prompts = [*({"prompt_token_ids": list(range(n, n + 6))} for n in range(6)), *prompts_of(family, chance, 64)]
    params = [
        SamplingParams(
            temperature=0.0 if n % 3 else 0.8,
            seed=n,
            max_tokens=int(chance.choice((1, 3, 20))),
            ignore_eos=True,
            logprobs=(None, 2)[n % 2],
            # Such steps go without graphs, in between.
            prompt_logprobs=1 if n == 10 else None,
        )
        for n in range(len(prompts))
    ]
    # A few short ones, all the rest, and a few of those again, of which the cache knows beginnings.
    parts = (slice(6), slice(6, None), slice(40, 43))
    want, got = (
        [output for part in parts for output in llm.generate(prompts[part], params[part], use_tqdm=False)]
        for llm in (plain, quick)
    )
    assert len(got) == len(prompts) + 3
    for one, other in zip(want, got, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for ours, theirs in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert [v.logprob for v in theirs.values()] == pytest.approx([v.logprob for v in ours.values()], abs=1e-4)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    assert plain.stats().retried == quick.stats().retried == 0
    assert sum(taken.values()) > 15
    kinds = {(bool(size.decodes), size.prefixes) for size in taken}
    assert kinds == {(False, True), (True, True), (False, False)}, "graphs of all kinds"


def test_a_nan_in_a_replay_is_one_request_s_own(
    engines: tuple[str, LLM, LLM, Counter[Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, quick, taken = engines
    adapter: Any = quick._run.core.executor.runner._adapter  # type: ignore[union-attr]
    embed, before = adapter.embed, taken.total()

    def poisoned(ids_T: Tensor) -> Tensor:
        return embed(ids_T).masked_fill((ids_T == 61).unsqueeze(-1), float("nan"))

    prompts = [{"prompt_token_ids": [*range(first, first + 8), last]} for first, last in ((10, 20), (30, 61), (40, 50))]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    clean = [output.outputs[0].token_ids for output in quick.generate(prompts, params, use_tqdm=False)]
    quick.reset_prefix_cache()
    monkeypatch.setattr(adapter, "embed", poisoned)
    one, ill, other = quick.generate(prompts, params, use_tqdm=False, on_error="return")
    assert "NaN" in str(ill.error)
    assert [one.outputs[0].token_ids, other.outputs[0].token_ids] == [clean[0], clean[2]]
    assert taken.total() > before


def test_steps_that_only_prefill_wait_for_their_buffers(
    engines: tuple[str, LLM, LLM, Counter[Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what such steps choose, and a device may be several of them behind."""
    _, _, quick, taken = engines
    ring = quick._run.core.executor.runner._mixed_graphs._ring  # type: ignore[union-attr]
    log: list[str] = []
    monkeypatch.setattr(ring, "_copied", tuple(Moment(log, number) for number in range(len(ring.buffers))))
    before = taken.total()
    quick.reset_prefix_cache()
    quick.generate({"prompt_token_ids": [10, *range(11, 60)] * 5}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert taken.total() - before > 1
    steps = [number for what, number in map(str.split, log) if what == "wait"]
    assert len(steps) == taken.total() - before
    assert log == [f"{what} {number}" for number in steps for what in ("wait", "copied")]


@pytest.mark.skipif("qwen3_omni_moe" not in tiny.TINY, reason="this transformers has no such family")
def test_a_picture_and_a_sound_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", test_graphs.capture)
    monkeypatch.setattr(mixed_graphs, "capture", test_mixed_graphs.capture)
    family, params = "qwen3_omni_moe", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    both = request(family, Ask("{i}{a}Hi", ((56, 56, 1),), sounds=((1.0, 2),)))
    apart = [
        request(family, Ask("{i}Hi", ((56, 56, 3),))),
        request(family, Ask("{a}Hi", sounds=((1.0, 4),))),
    ]
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 400}
    options |= {"num_gpu_blocks_override": 200, "dtype": "float32", "seed": 0, "media_workers": 0}
    path = str(tiny.checkpoint(family))
    with LLM(path, **options) as plain, LLM(path, async_scheduling=True, **options) as quick:
        equip(quick)
        for prompts in ([both], apart):
            want, got = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, quick))
            assert [o.outputs[0].token_ids for o in want] == [o.outputs[0].token_ids for o in got]
        assert quick.stats().retried == 0
