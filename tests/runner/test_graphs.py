"""Decode graphs on a CPU, where a stand-in computes again, in the same places, what a graph would replay."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beheld import LLM, SamplingParams
from beheld.attention.backend import AttnMetadata, LayerKV, Sharing
from beheld.attention.torch_ref import TorchBackend
from beheld.core.plan import SeqSlice
from beheld.runner import graphs
from beheld.runner.cache.conv import ConvCache
from beheld.runner.graphs import DecodeGraphs, ladder
from tests import tiny

FAMILIES = ["llama", "gemma3", "qwen2_vl", "qwen3_next"]
ROWS = 12


class StandIn:
    """Replays a step by computing it anew; the results go where those of the capture lie, as a graph's do."""

    def __init__(self, step: Callable[[Any], Any], size: Any, out: Any) -> None:
        self._step, self._size, self._out = step, size, out
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        logits_BV, best = self._step(self._size)
        for kept, fresh in zip((self._out[0], *self._out[1]), (logits_BV, *best), strict=True):
            kept.copy_(fresh)


def capture(sizes: Sequence[Any], step: Callable[[Any], Any], **_: Any) -> dict[Any, Any]:
    """In the place of beheld.runner.capture.capture."""
    made = {}
    with torch.inference_mode():
        for size in sizes:
            out = step(size)
            made[size] = (StandIn(step, size, out), out)
    return made


class DeviceReader:
    """Attention that, like a captured kernel, knows lengths only from `lengths_B`."""

    name = "device reader"
    captures_prefill = False
    stores_with_decodes = False
    sharing: Sharing | None = None
    delta = None

    def __init__(self) -> None:
        self._backend = TorchBackend()
        self._known: AttnMetadata | None = None

    def begin(self, metadata: AttnMetadata) -> None:
        """Nothing is read before the layers run."""
        self._known = None

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
        """As the reference, with the numbers that the device has."""
        if self._known is None:
            lengths = tuple(metadata.lengths_B.tolist())
            starts = tuple(length - 1 for length in lengths)
            self._known = dataclasses.replace(metadata, starts=starts, lengths=lengths)
            self._backend.begin(self._known)
        out_THC = self._backend.attend(q_THC, k_TKC, v_TKC, kv, self._known, scale, softcap, sinks_H)
        # Kernels leave the null block as it is.
        kv.keys[0].zero_()
        kv.values[0].zero_()
        return out_THC


def equip(llm: LLM) -> DecodeGraphs:
    """Give an engine on a CPU its decode graphs."""
    runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
    made = DecodeGraphs(runner._adapter, DeviceReader(), runner.kv, runner.caches, runner.config, runner.rows)
    made.capture(show_progress=False)
    runner._graphs = made
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM, DecodeGraphs]]:
    """An engine without graphs, and one of the same model with them, its steps overlapping."""
    options: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": ROWS, "num_gpu_blocks_override": 150}
    options |= {"block_size": 4, "dtype": "float32", "seed": 0, "media_workers": 0, "enable_prefix_caching": False}
    path = str(tiny.checkpoint(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "capture", capture)
        with LLM(path, **options) as plain, LLM(path, async_scheduling=True, **options) as quick:
            yield plain, quick, equip(quick)


def rows_held(logits: Iterable[Tensor]) -> int:
    """Rows of all the memory in which these tensors lie."""
    held = {made.untyped_storage().data_ptr(): made.untyped_storage().nbytes() // made[0].nbytes for made in logits}
    return sum(held.values())


def test_what_is_reserved_is_what_graphs_hold(engines: tuple[LLM, LLM, DecodeGraphs]) -> None:
    *_, made = engines
    assert rows_held(out[0] for _, out in made._graphs.values()) == graphs.kept_rows(ROWS, 1, sharing=False)


def requests(chance: np.random.Generator, count: int) -> list[Any]:
    return [{"prompt_token_ids": chance.integers(10, 60, size=chance.integers(2, 40)).tolist()} for _ in range(count)]


def test_replayed_steps_give_the_same_answers(engines: tuple[LLM, LLM, DecodeGraphs]) -> None:
    """Sequences come and go in all lengths, so that rows and blocks are soon another's."""
    plain, quick, made = engines
    chance = np.random.default_rng(5)
    prompts = requests(chance, 60)
    lengths = [int(n) for n in np.where(chance.random(60) < 0.4, 1, chance.integers(2, 40, size=60))]
    params = [
        SamplingParams(
            temperature=0.0 if n % 3 else 0.8,
            seed=n,
            max_tokens=length,
            ignore_eos=True,
            logprobs=(None, None, 2)[n % 3],
        )
        for n, length in enumerate(lengths)
    ]
    want, got = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, quick))
    for one, other in zip(want, got, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for ours, theirs in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert ours.keys() == theirs.keys()
            assert [v.logprob for v in theirs.values()] == pytest.approx([v.logprob for v in ours.values()], abs=1e-4)
    replays = {size: graph.replays for (_, size), (graph, _) in made._graphs.items()}  # type: ignore[attr-defined]
    assert sum(replays.values()) > 40
    assert sum(count > 0 for count in replays.values()) > 2, "padded and full, small and large"


def test_the_copy_of_the_tables_is_right_after_every_replay(
    engines: tuple[LLM, LLM, DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the changes are written in."""
    _, quick, made = engines
    changes = made._rows.changes

    def backwards() -> np.ndarray | None:
        found = changes()
        return None if found is None else found[:, ::-1].copy()

    refresh = made.refresh_tables

    def checked() -> None:
        refresh()
        assert np.array_equal(made.tables_GRN.numpy(), made._rows.tables_GRN)

    monkeypatch.setattr(made._rows, "changes", backwards)
    monkeypatch.setattr(made, "refresh_tables", checked)
    chance = np.random.default_rng(6)
    prompts, lengths = requests(chance, 90), np.where(chance.random(90) < 0.7, 1, chance.integers(2, 9, size=90))
    params = [SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True) for n in lengths]
    assert all(output.error is None for output in quick.generate(prompts, params, use_tqdm=False))


def test_a_step_s_result_is_not_that_of_the_next_replay(
    engines: tuple[LLM, LLM, DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN of one step says nothing of the step before, though that one is read after it was launched."""
    _, quick, made = engines
    runner: Any = quick._run.core.executor.runner  # type: ignore[union-attr]
    collect, results = runner.collect, []

    def kept(handle: Any) -> Any:
        results.append(collect(handle))
        return results[-1]

    def poisoned(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(size: Any) -> Any:
            logits_BV, _ = step(size)
            logits_BV[made._input_FB[1, : len(logits_BV)] == 15] = float("nan")
            return logits_BV, graphs.greedy(logits_BV)

        return run

    monkeypatch.setattr(runner, "collect", kept)
    for graph, _ in made._graphs.values():
        monkeypatch.setattr(graph, "_step", poisoned(graph._step))  # type: ignore[attr-defined]
    prompts = [{"prompt_token_ids": list(range(10, 10 + n))} for n in (8, 6, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    outputs = quick.generate(prompts, params, use_tqdm=False, on_error="return")
    assert all("NaN" in str(output.error) for output in outputs)
    assert sum(len(result.failed) for result in results) == 3
    assert all(result.logprobs.keys() == result.tokens.keys() for result in results)


def test_a_nan_in_the_cache_is_found_in_a_replay_and_ends_one_request(
    engines: tuple[LLM, LLM, DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two replays, the newest key of one of three rows becomes NaN; what its block held is nobody else's."""
    _, quick, made = engines
    runner: Any = quick._run.core.executor.runner  # type: ignore[union-attr]
    replay, steps = made.replay, itertools.count(1)

    def poisoned(slices: Sequence[SeqSlice]) -> Any:
        if len(slices) == 3 and next(steps) == 4:
            before = slices[1].start - 1
            for layer in runner.kv.values():
                block = int(made._rows.tables_GRN[layer.group, slices[1].row, before // made._block_size])
                layer.keys[block, before % made._block_size] = float("nan")
        return replay(slices)

    prompts = [{"prompt_token_ids": list(range(10, 10 + n))} for n in (8, 6, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    clean = [output.outputs[0].token_ids for output in quick.generate(prompts, params, use_tqdm=False)]
    with monkeypatch.context() as patch:
        patch.setattr(made, "replay", poisoned)
        one, ill, other = quick.generate(prompts, params, use_tqdm=False, on_error="return")
    assert "NaN" in str(ill.error)
    assert [one.outputs[0].token_ids, other.outputs[0].token_ids] == [clean[0], clean[2]]
    again = quick.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == clean, "blocks that held it are given out again"


def test_a_single_row_may_be_planned_before_all_layers(
    engines: tuple[LLM, LLM, DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention reads the plan before it waits, so embeddings, which do not start early, must come between."""
    *_, made = engines
    adapter, backend, done = made._adapter, made._backend, []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            done.append((name, [group.kv_heads for group in args[0].groups] if name == "begin" else None))
            return call(*args)

        return noting

    monkeypatch.setattr(backend, "begin", noted("begin", backend.begin))
    monkeypatch.setattr(backend, "attend", noted("attend", backend.attend))
    monkeypatch.setattr(adapter, "embed", noted("embed", adapter.embed))
    with torch.inference_mode():
        for size in (1, 2):
            done.clear()
            made._step(("plain", size))
            assert [name for name, _ in done[:3]] == ["begin", "embed", "attend"]
            attends = {layer.group: layer.keys.shape[2] for layer in made._kv.values() if isinstance(layer, LayerKV)}
            heads = attends if size == 1 else {}
            assert done[0][1] == [heads.get(index) for index in range(made._num_groups)]
        # No kernel would read the plan of what convolves.
        convs = tuple(ConvCache(cache.spec, index) for index, cache in enumerate(made._caches.tables))
        monkeypatch.setattr(made, "_caches", dataclasses.replace(made._caches, tables=convs))
        done.clear()
        made._step(("plain", 1))
        assert done[0][1] == [None] * made._num_groups


def test_the_small_input_of_a_step(engines: tuple[LLM, LLM, DecodeGraphs]) -> None:
    """Row, length, position, adapter and the slots of every group; padding reads and writes what does not count."""
    *_, made = engines
    rows, size = made._rows, made._block_size
    chance = np.random.default_rng(7)
    rows.tables_GRN[:] = chance.integers(1, 1000, size=rows.tables_GRN.shape)
    rows.delta_R[:] = chance.integers(-9, 1, size=ROWS)
    fields = np.full((7 + made._num_groups, ROWS), 77, dtype=np.int64)
    which, starts = np.array([5, 0, 11]), np.array([0, 33, 71])
    made._fill(fields, which, starts)
    for b, (row, start) in enumerate(zip(which, starts, strict=True)):
        assert fields[:4, b].tolist() == [row, start + 1, start + rows.delta_R[row], 0]
        assert fields[4:7, b].tolist() == [row + start % 2 * ROWS, row + (start + 1) % 2 * ROWS, 0]
        for group in range(made._num_groups):
            slot = fields[7 + group, b]
            assert slot // size == rows.tables_GRN[group, row, start // size]
            assert slot % size == start % size
    made._fill(fields, which, starts, np.array([0, 32, 32]))
    assert fields[6].tolist() == [0, 32, 32] + [0] * (ROWS - 3)
    padding = fields[:, 3:]
    assert (padding[1] == 1).all()
    assert (padding[[0, *range(2, len(fields))]] == 0).all()
    rows.tables_GRN[:], rows.delta_R[:] = 0, 0


def test_which_steps_are_replayed(engines: tuple[LLM, LLM, DecodeGraphs]) -> None:
    """Those in which every slice is one token that the device knows and the host does not, behind all media."""
    *_, made = engines
    rows = made._rows
    rows.known_R[:3], rows.media_stop_R[:3] = (8, 8, 8), (0, 0, 12)

    def taken(*slices: tuple[int, int, int]) -> bool:
        with torch.inference_mode():
            return made.replay([SeqSlice(row, start, stop, (), 1) for row, start, stop in slices]) is not None

    assert taken((0, 8, 9))
    assert taken((0, 8, 9), (1, 20, 21), (2, 12, 13))
    assert not taken((0, 8, 9), (1, 7, 8)), "a token of the prompt"
    assert not taken((0, 8, 9), (2, 11, 12)), "a place of an item"
    assert not taken((0, 8, 10))
    assert not taken(*((row, 8, 9) for row in [*range(ROWS), 0])), "more than the largest graph"
    rows.known_R[:3] = rows.media_stop_R[:3] = 0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 255, 256, 300, 512, 513, 1000, 1024, 2048, 5000])
def test_the_ladder_wastes_little(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most, "a full step has a graph"
    assert len(sizes) <= 48
    for below, size in itertools.pairwise(sizes):
        assert size - below <= max(64, below // 8)
        assert size <= 2 * below


def test_large_graphs_have_one_place_for_their_logits(
    engines: tuple[LLM, LLM, DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, quick, _ = engines
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_OWN_LOGITS", 4)
    runner: Any = quick._run.core.executor.runner  # type: ignore[union-attr]
    before, made = runner._graphs, equip(quick)
    monkeypatch.setattr(runner, "_graphs", before)
    places = {size: out[0].data_ptr() for (_, size), (_, out) in made._graphs.items()}
    assert places[ROWS] == places[8]
    assert len({places[ROWS], places[4], places[2], places[1]}) == 4
    kept = graphs.kept_rows(ROWS, 1, sharing=False)
    assert rows_held(out[0] for _, out in made._graphs.values()) == kept == ROWS + 4 + 2 + 1
    prompts = requests(np.random.default_rng(8), 14)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=8, ignore_eos=True)
    want = [output.outputs[0].token_ids for output in quick.generate(prompts, params, use_tqdm=False)]
    monkeypatch.setattr(runner, "_graphs", made)
    assert [output.outputs[0].token_ids for output in quick.generate(prompts, params, use_tqdm=False)] == want


class SharedReader(DeviceReader):
    """Checks what it is told of shared prefixes against the tables."""

    sharing = Sharing(4, 8, 1)

    def __init__(self) -> None:
        super().__init__()
        self.num_shared = 0

    def begin(self, metadata: AttnMetadata) -> None:
        super().begin(metadata)
        for group in metadata.groups:
            if group.shared_B is None:
                continue
            assert group.window is None
            for first in range(0, len(group.shared_B), 4):
                shared = group.shared_B[first : first + 4]
                tables = group.tables_BN[first : first + 4][shared > 0]
                assert len(shared[shared > 0].unique()) <= 1
                assert (shared < metadata.lengths_B[first : first + 4]).all()
                if len(tables):
                    count = int(shared.max()) // metadata.block_size
                    assert len(tables) > 1
                    assert (tables[:, :count] == tables[0, :count]).all()
                    assert (tables[:, :count] > 0).all()
                    self.num_shared += len(tables)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_share_prefixes_have_graphs_of_their_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_MIN_SHARING", 4)
    options: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": ROWS, "num_gpu_blocks_override": 150}
    options |= {"block_size": 4, "dtype": "float32", "seed": 0, "media_workers": 0}
    with LLM(str(tiny.checkpoint(family)), **options) as llm:
        runner: Any = llm._run.core.executor.runner  # type: ignore[union-attr]
        common = list(range(10, 34))
        prompts = [{"prompt_token_ids": [*common, 40 + index]} for index in range(11)]
        prompts += [{"prompt_token_ids": [50 + index, *common]} for index in range(4)]
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        # Now the common prefix is cached, and the sequences of the second run share it.
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        reader = SharedReader()
        made = DecodeGraphs(runner._adapter, reader, runner.kv, runner.caches, runner.config, runner.rows)
        made.capture(show_progress=False)
        runner._graphs = made
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert got == want
        assert rows_held(out[0] for _, out in made._graphs.values()) == graphs.kept_rows(ROWS, 1, sharing=True)
        if family == "gemma3":
            assert len(made._unwindowed) < made._num_groups
        assert reader.num_shared > 50
        replays = {kind: 0 for kind, _ in made._graphs}
        for (kind, _), (graph, _) in made._graphs.items():
            replays[kind] += graph.replays  # type: ignore[attr-defined]
        assert replays["sharing"] > 3
        assert replays["plain"] > 0
