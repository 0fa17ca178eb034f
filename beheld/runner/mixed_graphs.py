"""Graphs of steps in which something prefills, for a ladder of sizes.

Launching some ten kernels for each of a model's layers takes the host longer than a few hundred tokens take the
device, and many times longer while threads of the same interpreter prepare media: 40 to 110 ms for a step of a 7 B
model instead of 20. A replay is one call. As in `graphs.py`, all that changes lies in tensors that stay in place; the
step's numbers come there in one copy (mixed_layout.py), padded:

    tokens      d0 d1 .. | p0 p0 p0 p1 p1 ..... |     d: decode, one token each, padded to `decodes` of the graph
    sequences    0  1 .. |    D        D + 1 .. |     p: prefill, padded to its `tokens` and `sequences`

Padding that decodes has length 1 and slot 0, as in `graphs.py`; other padding has slot 0 and belongs to no sequence, so
that no tile of attention's work holds it.

Shapes: T tokens, B sequences (padded), S wanted logits, V vocabulary, H width of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, LayerCache, LayerKey
from beheld.attention.context import ForwardContext, Tail, forward_context
from beheld.core.config import EngineConfig
from beheld.models.adapter import ModelAdapter, of_wanted
from beheld.parallel.group import RankGroup
from beheld.platform.platform import Graph
from beheld.platform.registry import platform_of
from beheld.runner.batch import Layout
from beheld.runner.cache.cache import DeviceCaches
from beheld.runner.capture import capture
from beheld.runner.encoder_cache import EncoderCache
from beheld.runner.graphs import DecodeGraphs
from beheld.runner.last_layer_rows import FEWEST_ON_GPU
from beheld.runner.mixed_layout import GraphLayout, Size, lay_in
from beheld.runner.rows import Rows
from beheld.runner.staging import Ring

# A step of few sequences computes logits of few rows, which its first token need not wait for.
_FEW = 32
# Each takes some 70 ms at the start.
_SMALL = (32, 64, 128, 192, 256, 288, 384, 512, 640, 1024)
_LARGE = (128, 512, 1024, 2048, 4096, 8192)
# With a few decoding sequences, as in a server: padded to all rows, one prompt of 282 tokens would be computed as 768.
_SOME = 64
_WITH_DECODES = (64, 288, 512, 1024)
# Where no sequence has a prefix, which is common in the first steps of a run, attention has a faster kernel.
_PLAIN = (4096, 8192)
# The first replay of a graph takes the device a few milliseconds; computing more tokens than this takes 20 to 90.
_TRIED = 1024
# Computing more padding than this takes the device longer than launching the step takes the host.
_MOST_PADDING = 512
# In a small graph, a decoding sequence's keys are not split over programs; with more keys than this they should be.
_MOST_KEYS = 4096
# A piece of a prompt that every backend with a kernel for long ones computes outside of graphs.
_LONG = (0, 1 << 20)


class Need(NamedTuple):
    """What a step asks for: tokens and sequences that prefill, those that decode, and the most keys of one of these."""

    tokens: int
    sequences: int
    decodes: int
    keys: int
    prefixes: bool


def ladder(config: EngineConfig) -> list[Size]:
    """The graphs to capture: some for few sequences, others for as many as there are rows."""
    most, rows = config.max_num_batched_tokens, config.max_num_seqs
    large = (*_LARGE, min(most, _LARGE[-1]))
    sizes = {Size(tokens, min(rows, _FEW)) for tokens in _SMALL}
    sizes |= {Size(tokens, rows, decodes) for tokens in large for decodes in (0, rows)}
    sizes |= {Size(tokens, rows, prefixes=False) for tokens in _PLAIN}
    if rows > _SOME:
        sizes |= {Size(tokens, _SOME, _SOME) for tokens in _WITH_DECODES}
    return sorted((size for size in sizes if size.tokens <= most), key=_weight)


def kept_rows(config: EngineConfig) -> int:
    """Rows of logits that the graphs keep: there is one place for all of them."""
    return max(size.sequences for size in ladder(config))


def _weight(size: Size) -> tuple[int, ...]:
    return size.tokens + size.decodes, size.decodes, size.sequences, size.prefixes


def smallest(sizes: Sequence[Size], need: Need) -> Size | None:
    """The smallest of the sorted `sizes` that holds a step; None if all would pad it too much."""
    total = need.tokens + need.decodes
    for size in sizes:
        if size.decodes:
            known = need.decodes <= size.decodes
            fits = known and need.tokens <= size.tokens and need.sequences + need.decodes <= size.sequences
        else:
            # Here a decoding sequence takes a tile of 128 rows, and starts after position 0.
            known = need.decodes <= _FEW and need.keys <= _MOST_KEYS
            known = known and (size.prefixes or not (need.prefixes or need.decodes))
            fits = known and total <= size.tokens and need.sequences + need.decodes <= size.sequences
        if fits and size.tokens + size.decodes <= total + _MOST_PADDING:
            return size
    return None


def asks_backend(backend: AttentionBackend, ranks: RankGroup | None) -> bool:
    """Return whether the backend is asked which steps are faster outside of graphs.

    It decides by what it has tried on its own GPU, and ranks must all replay a graph, or none. So it is asked if all
    ranks' backends leave graphs, each of which has computed a prompt before; the host waits for them.
    """
    return ranks is None or bool(ranks.least([backend.outside_graphs([_LONG])])[0])


class MixedGraphs:
    """Captures and replays steps in which something prefills."""

    def __init__(
        self,
        adapter: ModelAdapter,
        backend: AttentionBackend,
        kv: dict[LayerKey, LayerCache],
        caches: DeviceCaches,
        config: EngineConfig,
        rows: Rows,
        encoder: EncoderCache,
        decode: DecodeGraphs,
        *,
        asks_backend: bool,
    ) -> None:
        """Lay out the ladder's steps; `asks_backend`: see the function of this name."""
        self._adapter, self._backend, self._kv = adapter, backend, kv
        self._caches = caches
        self._block_size = config.block_size
        self._asks_backend = asks_backend
        self._rows, self._encoder, self._decode = rows, encoder, decode
        device = adapter.device
        self._sizes = ladder(config)
        self._kept_rows = kept_rows(config)
        self._logits_SV: Tensor | None = None
        self._layouts = {
            size: GraphLayout.of(size, adapter.info.position_axes, len(caches.tables)) for size in self._sizes
        }
        most = max(size.tokens + size.decodes for size in self._sizes)
        num_bytes = max(layout.num_bytes for layout in self._layouts.values())
        # To the compiler, a tensor made outside of inference mode is different, and it would compile everything again.
        with torch.inference_mode():
            hidden = adapter.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
            self._embeds_TH = torch.zeros(most, hidden, dtype=adapter.dtype, device=device)
            self._flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            sequences = max(size.sequences + size.decodes for size in self._sizes)
            self._counting_B1 = torch.arange(sequences + 1, dtype=torch.int32, device=device)
            self._fields = {size: layout.on_device(self._flat) for size, layout in self._layouts.items()}
        self._ring = Ring(lambda pinned: torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned), device)
        self._arrays = [
            {size: layout.on_host(buffer.numpy()) for size, layout in self._layouts.items()}
            for buffer in self._ring.buffers
        ]
        self._graphs: dict[Size, tuple[Graph, Tensor]] = {}

    def capture(self, *, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the others fit into its memory.

        Raises:
            NotCapturedError: a step does something that no graph can hold.
        """
        sizes = self._sizes[::-1]
        self._graphs = capture(
            sizes,
            self._step,
            platform=platform_of(self._adapter.device),
            before=self._blank,
            first=[size for size in sizes if not size.prefixes][:1],
            long=[size for size in sizes if size.tokens > _TRIED],
            show_progress=show_progress,
            name="graphs of mixed steps",
        )

    @torch.inference_mode()
    def _blank(self, size: Size) -> None:
        """Write a step of nothing but padding: the numbers of another size would be invalid."""
        self._flat.zero_()
        self._fields[size].lengths_B.fill_(1)
        self._fields[size].seen_S.fill_(1)

    def _step(self, size: Size) -> Tensor:
        """The step itself, on the tensors that stay in place."""
        fields, sequences = self._fields[size], size.sequences + size.decodes
        tables_GBN = [tables_RN.index_select(0, fields.rows_B) for tables_RN in self._decode.tables_GRN]
        metadata = AttnMetadata(
            num_decodes=size.decodes,
            starts=(int(size.prefixes),) * sequences,
            lengths=(1,) * sequences,
            lengths_B=fields.lengths_B,
            cu_q_B1=fields.bounds_B,
            groups=self._caches.metadata(tuple(fields.slots_GT), tables_GBN),
            block_size=self._block_size,
            starts_B=fields.starts_B,
        )
        self._backend.begin(metadata)
        tail = self._tail(size, metadata)
        with forward_context(ForwardContext(self._backend, metadata, self._kv, tail=tail)):
            embeds_TH = self._embeds_TH[: size.tokens + size.decodes]
            hidden_TH = self._adapter.hidden(embeds_TH, fields.positions_XT)
            logits_SV = self._adapter.logits(of_wanted(hidden_TH, fields.wanted_S))
        if self._logits_SV is None:
            # In the first pass of all, which is not captured. Some thirty graphs would each keep their own.
            self._logits_SV = logits_SV.new_empty(self._kept_rows, logits_SV.shape[-1])
        return self._logits_SV[: size.sequences].copy_(logits_SV)

    def _tail(self, size: Size, metadata: AttnMetadata) -> Tail | None:
        """As runner/last_layer_rows.py makes it, of tensors that stay in place.

        Padding sees itself alone: all that stands before the first token would be read as often.
        """
        first, fields = self._adapter.tail_from, self._fields[size]
        if first is None or size.tokens < FEWEST_ON_GPU:
            return None
        tail = replace(
            metadata,
            num_decodes=size.sequences,
            starts=(0,) * size.sequences,
            lengths=(1,) * size.sequences,
            lengths_B=fields.seen_S,
            cu_q_B1=self._counting_B1[: size.sequences + 1],
            groups=tuple(
                replace(
                    group,
                    slots_T=torch.zeros_like(fields.wanted_S),
                    tables_BN=group.tables_BN.index_select(0, fields.owners_S),
                    extra={},
                )
                for group in metadata.groups
            ),
            starts_B=None,
            stored=True,
        )
        self._backend.begin(tail)
        return Tail(first, fields.wanted_S, tail)

    @staticmethod
    def worth(config: EngineConfig) -> bool:
        """True if steps can be as large as the smallest size."""
        return config.max_num_batched_tokens >= _SMALL[0]

    def _size_of(self, laid: Layout) -> Size | None:
        """The graph that carries out this step, if one can and is faster. Steps with LoRA adapters or draft tokens have
        none."""
        if laid.prompt_targets or laid.both_ways or laid.drafts or laid.lora_slots_T.any():
            return None
        decodes = laid.num_decodes
        pieces = [(each.start, each.stop) for each in laid.slices[decodes:]]
        if self._asks_backend and self._backend.outside_graphs(pieces):
            return None
        need = Need(
            tokens=len(laid.arrays["ids"]) - decodes,
            sequences=len(laid.slices) - decodes,
            decodes=decodes,
            keys=max((piece.stop for piece in laid.slices[:decodes]), default=0),
            prefixes=any(piece.start for piece in laid.slices[decodes:]),
        )
        return smallest(self._sizes, need)

    def replay(self, laid: Layout) -> tuple[Tensor, Tensor] | None:
        """Of this step, logits (S, V) of the sequences that sample, and where in Rows.newest_P the tokens that are
        chosen from them go (S); None if no graph holds such a one. Both stay valid until the next replay.

        Raises:
            StepError: embeddings are missing.
        """
        size = self._size_of(laid)
        if size is None:
            return None
        taken = self._taken(laid)
        merged = [place for places, _ in taken.values() for place in places]
        self._decode.refresh_tables()
        fields, turn = self._fields[size], self._ring.turn()
        lay_in(self._arrays[turn][size], size, laid, np.concatenate(merged) if merged else np.zeros(0, np.int64))
        self._ring.send(turn, self._flat[: self._layouts[size].num_bytes])
        if len(laid.arrays["places"]):
            newest_B = self._rows.newest_P.index_select(0, fields.sources_B)
            fields.ids_T.index_copy_(0, fields.places_B, newest_B)
        embeds_TH = self._embeds_TH[: size.tokens + size.decodes]
        embeds_TH.copy_(self._adapter.embed(fields.ids_T[:-1]))
        begin = 0
        for width, (_, sources) in taken.items():
            # Of many, joining takes one call, and so does writing. Towers may compute in another type.
            joined_EH = (torch.cat(sources) if len(sources) > 1 else sources[0]).to(embeds_TH.dtype)
            stop = begin + len(joined_EH)
            embeds_TH[:, :width].index_copy_(0, fields.merged_T[begin:stop], joined_EH)
            begin = stop
        graph, logits_SV = self._graphs[size]
        graph.replay()
        count = len(laid.sampling)
        return logits_SV[:count], fields.sampled_S[:count]

    def _taken(self, laid: Layout) -> dict[int, tuple[list[np.ndarray], list[Tensor]]]:
        """The embeddings that a step takes and their tokens, by width: where towers feed later layers too, those of
        images are wider than those of audio."""
        taken: dict[int, tuple[list[np.ndarray], list[Tensor]]] = {}
        for piece, first in zip(laid.slices, laid.first_token, strict=True):
            spans = self._rows[piece.row].spans
            if spans and piece.start < spans[-1].stop:
                for place, source_EH in self._encoder.taken(piece.start, piece.stop, spans):
                    places, sources = taken.setdefault(source_EH.shape[1], ([], []))
                    places.append(np.asarray(place) + first)
                    sources.append(source_EH)
        return taken
