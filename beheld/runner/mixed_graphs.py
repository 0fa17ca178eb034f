"""CUDA graphs of steps in which something prefills, for a ladder of sizes.

Launching some ten kernels for each of a model's layers takes the host longer than a few hundred tokens take the
device, and many times longer while threads of the same interpreter prepare media: 40 to 110 ms for a step of a 7 B
model instead of 20. A replay is one call. As in `graphs.py`, all that changes lies in tensors that stay in place; here
the step's own tensors are copied into them, padded:

    tokens      d0 d1 .. | p0 p0 p0 p1 p1 ..... |     d: decode, one token each, padded to `decodes` of the graph
    sequences    0  1 .. |    D        D + 1 .. |     p: prefill, padded to its `tokens` and `sequences`

Padding that decodes has length 1 and slot 0, as in `graphs.py`; other padding has slot 0 and belongs to no sequence, so
that no tile of attention's work holds it.

Shapes: T tokens, B sequences (padded), S wanted logits, G KV groups, X position axes, H width of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.context import ForwardContext, Tail, forward_context
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.adapter import ModelAdapter
from beheld.runner.batch import Batch
from beheld.runner.capture import capture
from beheld.runner.tail import FEWEST_ON_GPU

# A step of few sequences computes logits of few rows, which its first token need not wait for.
_FEW = 32
# Each takes some 70 ms at the start.
_SMALL = (32, 64, 128, 192, 256, 288, 384, 512, 640, 1024)
_LARGE = (128, 512, 1024, 2048, 4096, 8192)
# Beside some that decode, as in a server: padded to all rows, one prompt of 282 tokens would be computed as 768.
_SOME = 64
_BESIDE_SOME = (64, 288, 512, 1024)
# Where no sequence has a prefix, which is common in the first steps of a run, attention has a faster kernel.
_PLAIN = (4096, 8192)
# Taking a graph to the device takes it a few milliseconds; computing more tokens than this, 20 to 90.
_TRIED = 1024
# Padding by more tokens than this takes the device longer than launching the step takes the host.
_MOST_PADDING = 512
# As part of a small graph, a decoding sequence's keys are not split: with more of them than this, it had better be.
_MOST_KEYS = 4096


class Size(NamedTuple):
    """What a graph holds.

    Attributes:
        tokens: of sequences that prefill; with no `decodes`, those that decode are among them.
        sequences: that prefill; where some decode apart, of both together.
        decodes: sequences that decode.
        prefixes: True if sequences may continue what the cache holds.
    """

    tokens: int
    sequences: int
    decodes: int = 0
    prefixes: bool = True


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
        sizes |= {Size(tokens, _SOME, _SOME) for tokens in _BESIDE_SOME}
    return sorted((size for size in sizes if size.tokens <= most), key=_weight)


def kept_rows(config: EngineConfig) -> int:
    """Rows of logits that the graphs keep: there is one place for all of them."""
    return max(size.sequences for size in ladder(config))


def _weight(size: Size) -> tuple[int, ...]:
    return size.tokens + size.decodes, size.decodes, size.sequences, size.prefixes


def smallest(sizes: Sequence[Size], need: Need) -> Size | None:
    """The smallest of `sizes`, which stand in their order, that holds a step; None if all pad it much."""
    total = need.tokens + need.decodes
    for size in sizes:
        if size.decodes:
            known = need.decodes <= size.decodes
            fits = known and need.tokens <= size.tokens and need.sequences + need.decodes <= size.sequences
        else:
            # Here a sequence that decodes takes a tile of 128 rows, and begins behind position 0.
            known = need.decodes <= _FEW and need.keys <= _MOST_KEYS
            known = known and (size.prefixes or not (need.prefixes or need.decodes))
            fits = known and total <= size.tokens and need.sequences + need.decodes <= size.sequences
        if fits and size.tokens + size.decodes <= total + _MOST_PADDING:
            return size
    return None


class MixedGraphs:
    """Captures and replays steps in which something prefills."""

    def __init__(
        self,
        adapter: ModelAdapter,
        backend: AttentionBackend,
        kv: dict[int, LayerKV],
        info: ModelInfo,
        config: EngineConfig,
        blocks_per_row: int,
    ) -> None:
        self._adapter, self._backend, self._kv = adapter, backend, kv
        self._groups = info.kv_groups
        self._block_size = config.block_size
        device = adapter.device
        self._sizes = ladder(config)
        self._kept_rows = kept_rows(config)
        self._logits_SV: Tensor | None = None
        most = max(size.tokens + size.decodes for size in self._sizes)
        sequences = max(size.sequences + size.decodes for size in self._sizes)
        # A tensor made outside of inference mode is of another kind to the compiler, which would compile all anew.
        with torch.inference_mode():
            width = adapter.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
            self._embeds_TH = torch.zeros(most, width, dtype=adapter.dtype, device=device)
            self._positions_XT = torch.zeros(info.position_axes, most, dtype=torch.int64, device=device)
            self._slots_GT = torch.zeros(len(self._groups), most, dtype=torch.int64, device=device)
            self._wanted_S = torch.zeros(sequences, dtype=torch.int64, device=device)
            # The sequence of each wanted token, and how many positions that token sees.
            self._owners_S = torch.zeros(sequences, dtype=torch.int64, device=device)
            self._seen_S = torch.ones(sequences, dtype=torch.int32, device=device)
            self._starts_B = torch.zeros(sequences, dtype=torch.int32, device=device)
            self._lengths_B = torch.ones(sequences, dtype=torch.int32, device=device)
            self._bounds_B1 = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
            self._counting_B1 = torch.arange(sequences + 1, dtype=torch.int32, device=device)
            self._tables_GBN = torch.zeros(
                len(self._groups), sequences, blocks_per_row, dtype=torch.int32, device=device
            )
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, *, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the others fit into its memory.

        Raises:
            NotCapturedError: a step does something that no graph can hold.
        """
        sizes = self._sizes[::-1]
        first = [size for size in sizes if not size.prefixes][:1]
        long = [size for size in sizes if size.tokens > _TRIED]
        self._graphs = capture(
            sizes, self._step, first=first, long=long, show_progress=show_progress, name="graphs of mixed steps"
        )

    def _step(self, size: Size) -> Tensor:
        """The step itself, on the tensors that stay in place."""
        tokens, sequences = size.tokens + size.decodes, size.sequences + size.decodes
        groups = tuple(
            GroupMetadata(
                self._slots_GT[index, :tokens], self._tables_GBN[index, :sequences], group.window, chunk=group.chunk
            )
            for index, group in enumerate(self._groups)
        )
        metadata = AttnMetadata(
            num_decodes=size.decodes,
            starts=(int(size.prefixes),) * sequences,
            lengths=(1,) * sequences,
            lengths_B=self._lengths_B[:sequences],
            cu_q_B1=self._bounds_B1[: sequences + 1],
            groups=groups,
            block_size=self._block_size,
            starts_B=self._starts_B[:sequences],
        )
        self._backend.begin(metadata)
        tail = self._tail(size, metadata)
        with forward_context(ForwardContext(self._backend, metadata, self._kv, tail=tail)):
            logits_SV = self._adapter.forward(
                self._embeds_TH[:tokens], self._positions_XT[:, :tokens], self._wanted_S[: size.sequences]
            )
        if self._logits_SV is None:
            # In the first pass of all, which is not captured. Some thirty graphs would each keep their own.
            self._logits_SV = logits_SV.new_empty(self._kept_rows, logits_SV.shape[-1])
        return self._logits_SV[: size.sequences].copy_(logits_SV)

    def _tail(self, size: Size, metadata: AttnMetadata) -> Tail | None:
        """As runner/tail.py makes it, of tensors that stay in place.

        Padding is the first token, again and again, which sees itself alone: all that stands before it would be read as
        often.
        """
        first = self._adapter.tail_from
        if first is None or size.tokens < FEWEST_ON_GPU:
            return None
        wanted_S, owners_S = self._wanted_S[: size.sequences], self._owners_S[: size.sequences]
        tail = replace(
            metadata,
            num_decodes=size.sequences,
            starts=(0,) * size.sequences,
            lengths=(1,) * size.sequences,
            lengths_B=self._seen_S[: size.sequences],
            cu_q_B1=self._counting_B1[: size.sequences + 1],
            groups=tuple(
                replace(
                    group,
                    slots_T=torch.zeros_like(wanted_S),
                    tables_BN=group.tables_BN.index_select(0, owners_S),
                    extra={},
                )
                for group in metadata.groups
            ),
            starts_B=None,
            stored=True,
        )
        self._backend.begin(tail)
        return Tail(first, wanted_S, tail)

    @staticmethod
    def worth(config: EngineConfig) -> bool:
        """True if steps can be as large as the smallest size."""
        return config.max_num_batched_tokens >= _SMALL[0]

    def _size_of(self, batch: Batch) -> Size | None:
        """The graph that carries out this step, if one can; those with LoRA adapters go without."""
        if batch.prompt_targets or batch.metadata.both_ways or batch.lora_slots_T.any():
            return None
        metadata, decodes = batch.metadata, batch.metadata.num_decodes
        need = Need(
            tokens=batch.ids_T.shape[0] - decodes,
            sequences=len(metadata.starts) - decodes,
            decodes=decodes,
            keys=max(metadata.lengths[:decodes], default=0),
            prefixes=any(metadata.starts[decodes:]),
        )
        return smallest(self._sizes, need)

    def replay(self, batch: Batch, embeds_TH: Tensor) -> Tensor | None:
        """Logits (S, V) of this step, which stay valid until the next replay; None if no graph holds such a one."""
        metadata, size = batch.metadata, self._size_of(batch)
        if size is None:
            return None
        # Behind so many sequences, and as many tokens, so much padding follows.
        split = metadata.num_decodes if size.decodes else 0
        shift = size.decodes - split
        last = embeds_TH.shape[0] + shift
        _spread(self._embeds_TH, embeds_TH, split, shift)
        for padding in (slice(split, split + shift), slice(last, size.tokens + size.decodes)):
            self._embeds_TH[padding].zero_()
            self._slots_GT[:, padding].zero_()
        for axis, positions_T in zip(self._positions_XT, batch.positions_XT, strict=True):
            _spread(axis, positions_T, split, shift)
        for index, group in enumerate(metadata.groups):
            _spread(self._slots_GT[index], group.slots_T, split, shift)
            _spread(self._tables_GBN[index, :, : group.tables_BN.shape[1]], group.tables_BN, split, shift)
        # What an earlier, larger step wanted may lie outside this one.
        self._wanted_S.zero_()
        wanted_S = batch.wanted_S
        self._wanted_S[: wanted_S.shape[0]].copy_(torch.where(wanted_S < split, wanted_S, wanted_S + shift))
        owners_S = torch.bucketize(wanted_S, metadata.cu_q_B1[1:], right=True)
        self._seen_S.fill_(1)
        self._seen_S[: wanted_S.shape[0]].copy_(metadata.lengths_B.index_select(0, owners_S))
        self._owners_S.zero_()
        self._owners_S[: wanted_S.shape[0]].copy_(torch.where(owners_S < split, owners_S, owners_S + shift))
        # A sequence's first position is its length less its tokens of this step.
        bounds_B1 = metadata.cu_q_B1
        _spread(self._starts_B, metadata.lengths_B - bounds_B1.diff(), split, shift)
        _spread(self._lengths_B, metadata.lengths_B, split, shift)
        self._starts_B[split : split + shift].zero_()
        self._lengths_B[split : split + shift].fill_(1)
        self._bounds_B1.fill_(last)
        self._bounds_B1[: size.decodes + 1].copy_(self._counting_B1[: size.decodes + 1])
        self._bounds_B1[size.decodes : size.decodes + bounds_B1.shape[0] - split].copy_(bounds_B1[split:] + shift)
        graph, logits_SV = self._graphs[size]
        graph.replay()
        return logits_SV[: wanted_S.shape[0]]


def _spread(target: Tensor, source: Tensor, split: int, shift: int) -> None:
    """Copy `source` to the start of `target`, what stands from `split` on `shift` places further."""
    if split:
        target[:split].copy_(source[:split])
    target[split + shift : source.shape[0] + shift].copy_(source[split:])
