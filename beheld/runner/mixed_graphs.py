"""CUDA graphs of steps in which something prefills, for a ladder of token counts.

Launching some ten kernels for each of a model's layers takes the host longer than a few hundred tokens take the
device, and many times longer while threads of the same interpreter prepare media: 40 to 110 ms for a step of a 7 B
model instead of 20. A replay is one call. As in `graphs.py`, all that changes lies in tensors that stay in place; here
the step's own tensors are copied into them, padded: tokens that belong to no sequence have slot 0, and no tile of
attention's work holds them.

Shapes: T tokens, B sequences (padded), S wanted logits, G KV groups, X position axes, H width of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.context import ForwardContext, forward_context
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.adapter import ModelAdapter
from beheld.runner.batch import Batch
from beheld.runner.capture import capture

# (tokens, sequences): a step of few sequences computes logits of few rows, which its first token need not wait for.
_FEW = 32
_SMALL = (32, 64, 128, 192, 256, 288, 320, 384, 448, 512, 640, 768, 1024)
_LARGE = (384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192)
# Padding by more tokens than this takes the device longer than launching the step takes the host.
_MOST_PADDING = 512
# Attention does not split the keys of a decoding sequence here: with more of them than this, it had better.
_MOST_KEYS = 4096

Size = tuple[int, int]


def ladder(config: EngineConfig) -> list[Size]:
    """(Tokens, sequences) of the graphs: some for few sequences, others for as many as there are rows."""
    most, rows = config.max_num_batched_tokens, config.max_num_seqs
    small = {(tokens, min(rows, _FEW)) for tokens in _SMALL}
    large = {(tokens, rows) for tokens in (*_LARGE, min(most, _LARGE[-1]))}
    return sorted(size for size in small | large if size[0] <= most)


def smallest(sizes: Sequence[Size], tokens: int, sequences: int) -> Size | None:
    """The smallest of `sizes` that holds so much; None if there is none without much padding."""
    fitting = (size for size in sizes if tokens <= size[0] <= tokens + _MOST_PADDING and sequences <= size[1])
    return min(fitting, default=None)


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
        most, sequences = max(tokens for tokens, _ in self._sizes), config.max_num_seqs
        width = adapter.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
        self._embeds_TH = torch.zeros(most, width, dtype=adapter.dtype, device=device)
        self._positions_XT = torch.zeros(info.position_axes, most, dtype=torch.int64, device=device)
        self._slots_GT = torch.zeros(len(self._groups), most, dtype=torch.int64, device=device)
        self._wanted_S = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._starts_B = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._cu_q_B1 = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self._tables_GBN = torch.zeros(len(self._groups), sequences, blocks_per_row, dtype=torch.int32, device=device)
        self._graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, *, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        self._graphs = capture(self._sizes[::-1], self._step, show_progress=show_progress, name="graphs of mixed steps")

    def _step(self, size: Size) -> Tensor:
        """The step itself, on the tensors that stay in place."""
        tokens, sequences = size
        groups = tuple(
            GroupMetadata(
                self._slots_GT[index, :tokens], self._tables_GBN[index, :sequences], group.window, chunk=group.chunk
            )
            for index, group in enumerate(self._groups)
        )
        # Nothing decodes here, and so nothing asks for lengths.
        metadata = AttnMetadata(
            num_decodes=0,
            starts=(0,) * sequences,
            lengths=(1,) * sequences,
            lengths_B=self._starts_B[:sequences],
            cu_q_B1=self._cu_q_B1[: sequences + 1],
            groups=groups,
            block_size=self._block_size,
            starts_B=self._starts_B[:sequences],
        )
        self._backend.begin(metadata)
        with forward_context(ForwardContext(self._backend, metadata, self._kv)):
            return self._adapter.forward(
                self._embeds_TH[:tokens], self._positions_XT[:, :tokens], self._wanted_S[:sequences]
            )

    @staticmethod
    def worth(config: EngineConfig) -> bool:
        """True if steps can be as large as the smallest size."""
        return config.max_num_batched_tokens >= _SMALL[0]

    def takes(self, batch: Batch) -> bool:
        """True if a graph can carry out this step; those with LoRA adapters go without."""
        metadata = batch.metadata
        return (
            self._size_of(batch) is not None
            # Here a sequence that decodes takes a tile of 128 rows.
            and metadata.num_decodes <= _FEW
            and not metadata.both_ways
            and not batch.lora_slots_T.any()
            and max(metadata.lengths[: metadata.num_decodes], default=0) <= _MOST_KEYS
        )

    def _size_of(self, batch: Batch) -> Size | None:
        return smallest(self._sizes, batch.ids_T.shape[0], max(len(batch.metadata.starts), batch.wanted_S.shape[0]))

    def replay(self, batch: Batch, embeds_TH: Tensor) -> Tensor:
        """Logits (S, V) of a step that `takes` accepted; they stay valid until the next replay."""
        count, metadata = embeds_TH.shape[0], batch.metadata
        size = self._size_of(batch)
        assert size is not None, "not accepted by `takes`"
        padded = size[0]
        num_sequences = len(metadata.starts)
        self._embeds_TH[:count].copy_(embeds_TH)
        self._embeds_TH[count:padded].zero_()
        self._positions_XT[:, :count].copy_(batch.positions_XT)
        self._slots_GT[:, count:padded].zero_()
        for index, group in enumerate(metadata.groups):
            self._slots_GT[index, :count].copy_(group.slots_T)
            self._tables_GBN[index, :num_sequences, : group.tables_BN.shape[1]].copy_(group.tables_BN)
        # What an earlier, larger step wanted may lie outside this one.
        self._wanted_S.zero_()
        self._wanted_S[: batch.wanted_S.shape[0]].copy_(batch.wanted_S)
        # A sequence's first position is its length less its tokens of this step.
        counts_B = metadata.cu_q_B1[1:] - metadata.cu_q_B1[:-1]
        self._starts_B[:num_sequences].copy_(metadata.lengths_B - counts_B)
        self._cu_q_B1.fill_(count)
        self._cu_q_B1[: num_sequences + 1].copy_(metadata.cu_q_B1)
        graph, logits_SV = self._graphs[size]
        graph.replay()
        return logits_SV[: batch.wanted_S.shape[0]]
