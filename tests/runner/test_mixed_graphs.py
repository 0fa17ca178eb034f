"""Which graph carries out a step in which something prefills, and where the step's numbers lie in it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.core.config import EngineConfig
from beheld.runner import mixed_graphs
from beheld.runner.batch import Batch
from beheld.runner.mixed_graphs import MixedGraphs, Need, Size, ladder, smallest
from tests.fakes import fake_config, fake_info
from tests.runner.test_graphs import rows_held


def config(tokens: int, rows: int) -> EngineConfig:
    return fake_config(max_num_batched_tokens=tokens, max_num_seqs=rows)


@pytest.mark.parametrize(("tokens", "rows"), [(8192, 256), (2048, 8), (100, 4), (5000, 64), (32768, 512)])
def test_no_graph_is_larger_than_a_step_can_be(tokens: int, rows: int) -> None:
    sizes = ladder(config(tokens, rows))
    assert len(set(sizes)) == len(sizes)
    assert all(size.tokens <= tokens and max(size.sequences, size.decodes) <= rows for size in sizes)
    assert max(size.tokens for size in sizes) == min(tokens, 8192), "a full step has a graph"


def need(tokens: int, sequences: int = 1, decodes: int = 0, keys: int = 0, prefixes: bool = True) -> Need:
    return Need(tokens, sequences, decodes, keys, prefixes)


SIZES = ladder(config(8192, 256))


@pytest.mark.parametrize(
    ("step", "graph"),
    [
        (need(282), Size(288, 32)),
        (need(593, prefixes=False), Size(640, 32)),
        (need(282, decodes=3, keys=100), Size(288, 32)),
        (need(282, decodes=3, keys=9000), Size(288, 64, 64)),
        (need(282, 33), Size(288, 64, 64)),
        (need(282, 65), Size(512, 256)),
        (need(300, 3, decodes=100, keys=9000), Size(512, 256, 256)),
        (need(282, 1, decodes=60), Size(288, 64, 64)),
        (need(282, 5, decodes=60), Size(512, 256, 256)),
        (need(300, 3, decodes=253), Size(512, 256, 256)),
        (need(8192, 29), Size(8192, 256)),
        (need(8192, 29, prefixes=False), Size(8192, 256, prefixes=False)),
        (need(8000, 29, decodes=192), Size(8192, 256, 256)),
        (need(4000, 29, prefixes=False), Size(4096, 256, prefixes=False)),
        (need(4000, 29, decodes=1, prefixes=False), Size(4096, 256)),
    ],
)
def test_the_smallest_that_holds_a_step_is_taken(step: Need, graph: Size | None) -> None:
    assert smallest(SIZES, step) == graph


@pytest.mark.parametrize("step", [need(5000), need(8193), need(600, 257), need(10, decodes=257)])
def test_much_padding_is_no_gain(step: Need) -> None:
    assert smallest(SIZES, step) is None


def test_every_graph_holds_what_it_says() -> None:
    """Whatever is taken holds the step, and some step takes every graph."""
    taken = set()
    chance = random.Random(3)
    for _ in range(4000):
        tokens = max(1, chance.randint(1, 8192) >> chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 8)))
        decodes = chance.choice((0, 0, chance.randint(1, 256)))
        sequences = min(tokens, chance.choice((1, 20, 200)))
        step = need(tokens, sequences, decodes, 200, prefixes=chance.random() < 0.5)
        size = smallest(SIZES, step)
        if size is not None:
            taken.add(size)
            beside = 0 if size.decodes else step.decodes
            assert step.tokens + beside <= size.tokens
            assert step.sequences + beside <= size.sequences
            assert size.prefixes or not (step.prefixes or step.decodes)
    assert len(taken) > 0.8 * len(SIZES)


WIDTH = 3


class _Adapter:
    """What MixedGraphs asks of a model before it captures."""

    device, dtype = torch.device("cpu"), torch.float32

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_T), WIDTH)


def batch_of(counts: list[int], starts: list[int], decodes: int, chance: torch.Generator) -> Batch:
    """A step of these sequences, with random slots, tables and positions; the last token of each is wanted."""
    total = sum(counts)
    bounds = torch.tensor([0, *counts]).cumsum(0)
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(1, 1000, shape, generator=chance)

    metadata = AttnMetadata(
        num_decodes=decodes,
        starts=tuple(starts),
        lengths=tuple(lengths),
        lengths_B=torch.tensor(lengths).int(),
        cu_q_B1=bounds.int(),
        groups=(GroupMetadata(numbers(total), numbers(len(counts), 4).int(), None),),
        block_size=4,
    )
    wanted = bounds[1:] - 1
    slots = np.zeros(total, dtype=np.int64)
    return Batch([], [], numbers(total), numbers(1, total), metadata, wanted, [], wanted, slots, [])


@pytest.mark.parametrize("decodes", [0, 2, 40, 62])
@torch.inference_mode()
def test_where_a_step_lies_in_its_graph(decodes: int) -> None:
    """Whatever an earlier step left there."""
    graphs = MixedGraphs(_Adapter(), None, {}, fake_info(), config(512, 64), 8)  # type: ignore[arg-type]
    chance = torch.Generator().manual_seed(decodes)
    seen: dict[str, Any] = {}
    for size in graphs._sizes:

        class Graph:
            def replay(self, size: Size = size) -> None:
                seen["size"] = size

        graphs._graphs[size] = (Graph(), torch.arange(float(size.sequences)))  # type: ignore[assignment]
    for tokens in (300, 9):
        counts = [1] * decodes + [tokens - 5, 5]
        starts = [*range(3, 3 + decodes), 0, 17]
        batch = batch_of(counts, starts, decodes, chance)
        embeds_TH = torch.randn(sum(counts), WIDTH, generator=chance)
        logits = graphs.replay(batch, embeds_TH)
        assert logits is not None
        assert len(logits) == len(counts)
        size = seen["size"]
        assert bool(size.decodes) == (decodes > 32)
        split, shift = (decodes, size.decodes - decodes) if size.decodes else (0, 0)
        place = torch.arange(sum(counts)) + shift * (torch.arange(sum(counts)) >= split)
        owner = torch.arange(len(counts)) + shift * (torch.arange(len(counts)) >= split)
        assert torch.equal(graphs._embeds_TH[place], embeds_TH)
        assert torch.equal(graphs._positions_XT[:, place], batch.positions_XT)
        assert torch.equal(graphs._slots_GT[0, place], batch.metadata.groups[0].slots_T)
        assert torch.equal(graphs._tables_GBN[0, owner, :4], batch.metadata.groups[0].tables_BN)
        assert graphs._starts_B[owner].tolist() == starts
        assert torch.equal(graphs._lengths_B[owner], batch.metadata.lengths_B)
        assert graphs._bounds_B1.diff()[owner].tolist() == counts
        assert torch.equal(graphs._embeds_TH[graphs._wanted_S[: len(counts)]], embeds_TH[batch.wanted_S])
        inside = size.tokens + size.decodes
        padding = torch.tensor(sorted(set(range(inside)) - set(place.tolist())))
        assert not graphs._slots_GT[0, padding].any(), "padding writes nothing that counts"
        assert (graphs._lengths_B[split : size.decodes] == 1).all(), "and sees nothing but itself"
        assert graphs._bounds_B1.diff()[len(counts) + shift :].count_nonzero() == 0
        assert (graphs._wanted_S[: size.sequences] < inside).all()


class _StandIn:
    """Replays a step by computing it anew, in place."""

    def __init__(self, step: Any, size: Size) -> None:
        self._step, self._size = step, size

    def replay(self) -> None:
        self._step(self._size)


def capture(sizes: Any, step: Any, **_: Any) -> dict[Size, Any]:
    """In the place of beheld.runner.capture.capture."""
    return {size: (_StandIn(step, size), step(size)) for size in sizes}


class _Backend:
    def begin(self, metadata: AttnMetadata) -> None:
        """Nothing attends."""


class _Head(_Adapter):
    """Logits that tell which inputs they are of."""

    tail_from = None

    def forward(self, embeds_TH: torch.Tensor, positions_XT: torch.Tensor, wanted_S: torch.Tensor) -> torch.Tensor:
        return embeds_TH[wanted_S].repeat(1, 5)


@torch.inference_mode()
def test_graphs_have_one_place_for_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "capture", capture)
    made = MixedGraphs(_Head(), _Backend(), {}, fake_info(), config(512, 64), 8)  # type: ignore[arg-type]
    made.capture(show_progress=False)
    outs = [out for _, out in made._graphs.values()]
    assert rows_held(outs) == mixed_graphs.kept_rows(config(512, 64)) == 64
    assert all(len(out) == size.sequences for size, (_, out) in made._graphs.items())
    chance = torch.Generator().manual_seed(1)
    for tokens in (300, 9, 40):
        counts = [1, 1, tokens - 5, 5]
        batch = batch_of(counts, [4, 9, 0, 17], 2, chance)
        embeds_TH = torch.randn(sum(counts), WIDTH, generator=chance)
        logits = made.replay(batch, embeds_TH)
        assert logits is not None
        assert torch.equal(logits, embeds_TH[batch.wanted_S].repeat(1, 5))


class _Tailed(_Head):
    tail_from = 0  # type: ignore[assignment]


class _Listener(_Backend):
    """Keeps what is said of the tail last begun."""

    def begin(self, metadata: AttnMetadata) -> None:
        if metadata.stored:
            self.lengths = metadata.lengths_B.tolist()


@pytest.mark.parametrize("decodes", [1, 40])
@torch.inference_mode()
def test_what_pads_a_tail_looks_at_no_keys(decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a long prompt wants no logits, or one; each of the others would read all that stands before it."""
    monkeypatch.setattr(mixed_graphs, "capture", capture)
    monkeypatch.setattr(mixed_graphs, "FEWEST_ON_GPU", 256)
    backend = _Listener()
    made = MixedGraphs(_Tailed(), backend, {}, fake_info(), config(512, 64), 8)  # type: ignore[arg-type]
    made.capture(show_progress=False)
    chance = torch.Generator().manual_seed(1)
    for prefix in (900, 17):
        counts, starts = [1] * decodes + [300], [50] * decodes + [prefix]
        batch = batch_of(counts, starts, decodes, chance)
        assert made.replay(batch, torch.randn(sum(counts), WIDTH, generator=chance)) is not None
        assert backend.lengths[: decodes + 1] == batch.metadata.lengths_B.tolist()
        assert set(backend.lengths[decodes + 1 :]) == {1}
    batch.wanted_S = batch.wanted_S[:0]
    assert made.replay(batch, torch.randn(sum(counts), WIDTH, generator=chance)) is not None
    assert set(backend.lengths) == {1}
