"""Which graph carries out a step in which something prefills, and where the step's numbers lie in it."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beheld.attention.backend import AttnMetadata
from beheld.core.config import EngineConfig
from beheld.core.plan import SeqSlice, SpanView
from beheld.parallel.group import RankGroup
from beheld.runner import mixed_graphs
from beheld.runner.batch import Layout
from beheld.runner.cache.registry import make_caches
from beheld.runner.encoder_cache import EncoderCache
from beheld.runner.mixed_graphs import MixedGraphs, Need, Size, asks_backend, ladder, smallest
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
    """What MixedGraphs asks of a model before it captures. An id's embedding tells it."""

    device, dtype, info = torch.device("cpu"), torch.float32, fake_info()

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return ids_T.unsqueeze(-1) * torch.tensor([1.0, 2.0, 0.0])


class _Row:
    def __init__(self, spans: tuple[SpanView, ...]) -> None:
        self.spans = spans


class _Rows(dict[int, _Row]):
    """Rows whose newest tokens are 1000 and their place."""

    newest_P = torch.arange(1000, 1200)


class _Decode:
    """Tables of which a row's first block tells the row."""

    tables_GRN = (torch.arange(64) * 10).int().reshape(1, 64, 1).repeat(1, 1, 8)
    refreshed = 0

    def refresh_tables(self) -> None:
        self.refreshed += 1


class _Backend:
    sharing = None

    def begin(self, metadata: AttnMetadata) -> None:
        """Nothing attends."""

    def outside_graphs(self, pieces: list[tuple[int, int]]) -> bool:
        """Pieces of prompts that start at this position, and no others, are faster outside."""
        return any(start == 9_999 for start, _ in pieces)


def graphs_of(
    adapter: Any, backend: Any, tokens: int, seats: int, rows: _Rows, *, asks_backend: bool = True
) -> MixedGraphs:
    made: Any = (
        adapter,
        backend,
        {},
        make_caches(fake_info()),
        config(tokens, seats),
        rows,
        EncoderCache(adapter),
        _Decode(),
    )
    return MixedGraphs(*made, asks_backend=asks_backend)


def layout_of(counts: list[int], starts: list[int], decodes: int, chance: torch.Generator) -> tuple[Layout, _Rows]:
    """A step of these sequences, with random numbers; the last token of each is wanted. Of those that decode, the
    device alone knows the tokens. The last sequence has a picture.
    """
    total, many = sum(counts), len(counts)
    bounds = np.cumsum([0, *counts])
    lengths = np.array(starts) + counts
    rows = torch.randperm(64, generator=chance)[:many].tolist()

    def numbers(*shape: int) -> np.ndarray:
        return torch.randint(1, 1000, shape, generator=chance).numpy()

    arrays = {
        "ids": numbers(total),
        "positions": numbers(1, total),
        "places": np.arange(decodes),
        "sources": numbers(decodes) % 100,
        "lengths": lengths.astype(np.int32),
        "bounds": bounds.astype(np.int32),
        "slots 0": numbers(total),
        "tables 0": numbers(many, 4).astype(np.int32),
        "wanted": bounds[1:] - 1,
        "sampled": numbers(many) % 100,
    }
    pieces = [
        SeqSlice(row, start, start + count, (), 1) for row, start, count in zip(rows, starts, counts, strict=True)
    ]
    laid = Layout(pieces, counts, bounds[:-1].tolist(), arrays, pieces, np.zeros(total, dtype=np.int64), [], ())
    span = SpanView("image", b"picture", starts[-1] + 1, starts[-1] + 3, None, 2, {})
    return laid, _Rows({row: _Row((span,) if row == rows[-1] else ()) for row in rows})


def embeds_of(laid: Layout, rows: _Rows) -> torch.Tensor:
    """The inputs of a step's tokens."""
    ids = torch.from_numpy(laid.arrays["ids"]).clone()
    ids[laid.arrays["places"]] = rows.newest_P[laid.arrays["sources"]]
    embeds = _Adapter().embed(ids)
    embeds[laid.first_token[-1] + 1 : laid.first_token[-1] + 3, :2] = PICTURE
    return embeds


# Narrower than an input, and of another type.
PICTURE = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.bfloat16)


@pytest.mark.parametrize("decodes", [0, 2, 40, 62])
@torch.inference_mode()
def test_where_a_step_lies_in_its_graph(decodes: int) -> None:
    """Whatever an earlier step left there."""
    graphs = graphs_of(_Adapter(), _Backend(), 512, 64, _Rows())
    graphs._flat.fill_(77)
    for buffer in graphs._ring.buffers:
        buffer.fill_(77)
    chance = torch.Generator().manual_seed(decodes)
    seen: dict[str, Any] = {}
    for size in graphs._sizes:

        class Graph:
            def replay(self, size: Size = size) -> None:
                seen["size"] = size

        graphs._graphs[size] = (Graph(), torch.arange(float(size.sequences)))  # type: ignore[assignment]
    graphs._encoder._embeds[b"picture"] = PICTURE
    for tokens in (300, 9):
        counts = [1] * decodes + [tokens - 5, 5]
        starts = [*range(3, 3 + decodes), 0, 17]
        laid, rows = layout_of(counts, starts, decodes, chance)
        graphs._rows = rows  # type: ignore[assignment]
        replayed = graphs.replay(laid)
        assert replayed is not None
        logits, sampled = replayed
        assert len(logits) == len(counts)
        assert sampled.tolist() == laid.arrays["sampled"].tolist()
        size = seen["size"]
        fields = graphs._fields[size]
        assert bool(size.decodes) == (decodes > 32)
        split, shift = (decodes, size.decodes - decodes) if size.decodes else (0, 0)
        place = torch.arange(sum(counts)) + shift * (torch.arange(sum(counts)) >= split)
        owner = torch.arange(len(counts)) + shift * (torch.arange(len(counts)) >= split)
        embeds_TH = embeds_of(laid, rows)
        assert torch.equal(graphs._embeds_TH[place], embeds_TH)
        assert np.array_equal(fields.positions_XT[:, place], laid.arrays["positions"])
        assert np.array_equal(fields.slots_GT[0, place], laid.arrays["slots 0"])
        assert fields.rows_B[owner].tolist() == [piece.row for piece in laid.slices]
        assert fields.starts_B[owner].tolist() == starts
        assert np.array_equal(fields.lengths_B[owner], laid.arrays["lengths"])
        assert fields.bounds_B.diff()[owner].tolist() == counts
        assert torch.equal(graphs._embeds_TH[fields.wanted_S[: len(counts)]], embeds_TH[laid.arrays["wanted"]])
        assert fields.seen_S[: len(counts)].tolist() == laid.arrays["lengths"].tolist()
        assert fields.owners_S[: len(counts)].tolist() == owner.tolist()
        inside = size.tokens + size.decodes
        padding = torch.tensor(sorted(set(range(inside)) - set(place.tolist())))
        assert not fields.slots_GT[0, padding].any(), "padding writes nothing that counts"
        assert not fields.positions_XT[:, padding].any()
        assert not fields.ids_T[padding].any()
        alone = torch.tensor(sorted(set(range(len(fields.lengths_B))) - set(owner.tolist())), dtype=torch.int64)
        assert (fields.lengths_B[alone] == 1).all(), "and sees nothing but itself"
        assert not fields.rows_B[alone].any()
        assert not fields.starts_B[alone].any()
        assert fields.bounds_B.diff()[len(counts) + shift :].count_nonzero() == 0
        assert fields.bounds_B[: size.decodes + 1].tolist() == list(range(size.decodes + 1))
        assert not fields.wanted_S[len(counts) :].any()
        assert (fields.seen_S[len(counts) :] == 1).all()


@pytest.mark.parametrize("what", ["prompt_targets", "both_ways", "lora_slots_T"])
def test_what_no_graph_holds_is_launched(what: str) -> None:
    """Reports on prompts would be lost, adapters be ignored."""
    laid, rows = layout_of([300, 5], [0, 17], 0, torch.Generator().manual_seed(1))
    graphs = graphs_of(_Adapter(), _Backend(), 512, 64, rows)
    assert graphs._size_of(laid) is not None
    one = {"prompt_targets": [None], "both_ways": ((0, 1),), "lora_slots_T": np.arange(305) == 304}[what]
    assert graphs._size_of(dataclasses.replace(laid, **{what: one})) is None


def test_long_prompts_are_launched_where_the_backend_wants_them_so() -> None:
    """Rows that decode at the same position are none."""
    for starts, expected in (([9_999, 0], True), ([0, 9_999], False)):
        laid, rows = layout_of([1, 300], starts, 1, torch.Generator().manual_seed(1))
        graphs = graphs_of(_Adapter(), _Backend(), 512, 64, rows)
        assert (graphs._size_of(laid) is not None) == expected
        # What one rank's backend wants, another's may not.
        graphs = graphs_of(_Adapter(), _Backend(), 512, 64, rows, asks_backend=False)
        assert graphs._size_of(laid) is not None


class _Tried(_Backend):
    """A backend whose kernel for long prompts works on this rank, or does not."""

    def __init__(self, works: bool) -> None:
        self.works = works

    def outside_graphs(self, pieces: list[tuple[int, int]]) -> bool:
        return self.works and sum(stop - start for start, stop in pieces) >= 300


@pytest.mark.parametrize("works", [(True, True), (True, False), (False, False)])
def test_ranks_replay_a_graph_or_none_whatever_one_of_them_cannot_do(works: tuple[bool, bool], tmp_path: Path) -> None:
    """Two ranks over gloo; with one alone the backend decides."""
    groups = [RankGroup(rank, 2, tmp_path, None, lambda: None) for rank in range(2)]
    backends = [_Tried(each) for each in works]
    found: dict[int, bool] = {}

    def agree(rank: int) -> None:
        found[rank] = asks_backend(backends[rank], groups[rank])  # type: ignore[arg-type]

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[rank] for rank in range(2)] == [all(works)] * 2
    sizes = []
    for rank, backend in enumerate(backends):
        laid, rows = layout_of([1, 300], [0, 0], 1, torch.Generator().manual_seed(1))
        graphs = graphs_of(_Adapter(), backend, 512, 64, rows, asks_backend=found[rank])
        sizes.append(graphs._size_of(laid))
    assert sizes[0] == sizes[1]
    assert (sizes[0] is None) == all(works)
    assert asks_backend(backends[0], None)  # type: ignore[arg-type]
    for group in groups:
        group.close()


@torch.inference_mode()
def test_embeddings_of_unlike_widths_in_one_step() -> None:
    """Pictures of Qwen3-Omni bring what goes into later layers, sounds do not."""
    laid, rows = layout_of([40, 30], [0, 17], 0, torch.Generator().manual_seed(1))
    graphs = graphs_of(_Adapter(), _Backend(), 512, 64, rows)
    for size in graphs._sizes:
        graphs._graphs[size] = (type("Graph", (), {"replay": lambda self: None})(), torch.zeros(64))
    want = embeds_of(laid, rows)
    sounds = torch.tensor([[7.0], [8.0], [9.0]])
    rows[laid.slices[0].row] = _Row((SpanView("audio", b"sound", 4, 7, None, 3, {}),))
    want[4:7, :1] = sounds
    graphs._encoder._embeds |= {b"picture": PICTURE, b"sound": sounds}
    assert graphs.replay(laid) is not None
    assert torch.equal(graphs._embeds_TH[:70], want)


class _StandIn:
    """Replays a step by computing it anew, in place."""

    def __init__(self, step: Any, size: Size) -> None:
        self._step, self._size = step, size

    def replay(self) -> None:
        self._step(self._size)


def capture(sizes: Any, step: Any, *, before: Any = None, **_: Any) -> dict[Size, Any]:
    """In the place of beheld.runner.capture.capture."""
    made = {}
    for size in sizes:
        if before is not None:
            before(size)
        made[size] = (_StandIn(step, size), step(size))
    return made


class _Head(_Adapter):
    """Logits that tell which inputs they are of."""

    tail_from = None

    def hidden(self, embeds_TH: torch.Tensor, positions_XT: torch.Tensor) -> torch.Tensor:
        return embeds_TH

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        return hidden_SH.repeat(1, 5)


@torch.inference_mode()
def test_graphs_have_one_place_for_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "capture", capture)
    made = graphs_of(_Head(), _Backend(), 512, 64, _Rows())
    made.capture(show_progress=False)
    made._encoder._embeds[b"picture"] = PICTURE
    outs = [out for _, out in made._graphs.values()]
    assert rows_held(outs) == mixed_graphs.kept_rows(config(512, 64)) == 64
    assert all(len(out) == size.sequences for size, (_, out) in made._graphs.items())
    chance = torch.Generator().manual_seed(1)
    for tokens in (300, 9, 40):
        counts = [1, 1, tokens - 5, 5]
        laid, rows = layout_of(counts, [4, 9, 0, 17], 2, chance)
        made._rows = rows  # type: ignore[assignment]
        replayed = made.replay(laid)
        assert replayed is not None
        assert torch.equal(replayed[0], embeds_of(laid, rows)[laid.arrays["wanted"]].repeat(1, 5))


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
    made = graphs_of(_Tailed(), backend, 512, 64, _Rows())
    made.capture(show_progress=False)
    made._encoder._embeds[b"picture"] = PICTURE
    chance = torch.Generator().manual_seed(1)
    for prefix in (900, 17):
        counts, starts = [1] * decodes + [300], [50] * decodes + [prefix]
        laid, rows = layout_of(counts, starts, decodes, chance)
        made._rows = rows  # type: ignore[assignment]
        assert made.replay(laid) is not None
        assert backend.lengths[: decodes + 1] == laid.arrays["lengths"].tolist()
        assert set(backend.lengths[decodes + 1 :]) == {1}
    laid.arrays["wanted"], laid.arrays["sampled"] = laid.arrays["wanted"][:0], laid.arrays["sampled"][:0]
    laid.sampling = []
    replayed = made.replay(laid)
    assert replayed is not None
    assert len(replayed[0]) == 0
    assert set(backend.lengths) == {1}
