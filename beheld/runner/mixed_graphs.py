"""CUDA graphs of small steps in which something prefills, for a ladder of token counts.

Launching some ten kernels for each of a model's layers takes the host longer than a few hundred tokens take the
device. As in `graphs.py`, all that changes lies in tensors that stay in place; here the step's own tensors are copied
into them, padded: tokens that belong to no sequence have slot 0, and no tile of attention's work holds them.

Shapes: T tokens, B sequences (padded), S wanted logits, G KV groups, X position axes, H width of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.context import ForwardContext, forward_context
from beheld.core.config import EngineConfig, ModelInfo
from beheld.models.adapter import ModelAdapter
from beheld.runner.batch import Batch
from beheld.runner.capture import capture

SIZES = (32, 64, 128, 192, 256, 288, 320, 384, 448, 512)
_SEQUENCES = 32
# Attention does not split the keys of a decoding sequence here: with more of them than this, it had better.
_MOST_KEYS = 4096


class MixedGraphs:
    """Captures and replays small steps."""

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
        self._sizes = [size for size in SIZES if size <= config.max_num_batched_tokens]
        most, sequences = self._sizes[-1], _SEQUENCES
        width = adapter.embed(torch.zeros(1, dtype=torch.int64, device=device)).shape[-1]
        self._embeds_TH = torch.zeros(most, width, dtype=adapter.dtype, device=device)
        self._positions_XT = torch.zeros(info.position_axes, most, dtype=torch.int64, device=device)
        self._slots_GT = torch.zeros(len(self._groups), most, dtype=torch.int64, device=device)
        self._wanted_S = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._starts_B = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._cu_q_B1 = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self._tables_GBN = torch.zeros(len(self._groups), sequences, blocks_per_row, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, *, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        sizes = self._sizes[::-1]
        self._graphs = capture(sizes, self._step, show_progress=show_progress, name="CUDA graphs of small steps")

    def _step(self, size: int) -> Tensor:
        """The step itself, on the tensors that stay in place."""
        groups = tuple(
            GroupMetadata(self._slots_GT[index, :size], self._tables_GBN[index], group.window, chunk=group.chunk)
            for index, group in enumerate(self._groups)
        )
        # Nothing decodes here, and so nothing asks for lengths.
        metadata = AttnMetadata(
            num_decodes=0,
            starts=(0,) * _SEQUENCES,
            lengths=(1,) * _SEQUENCES,
            lengths_B=self._starts_B,
            cu_q_B1=self._cu_q_B1,
            groups=groups,
            block_size=self._block_size,
            starts_B=self._starts_B,
        )
        self._backend.begin(metadata)
        with forward_context(ForwardContext(self._backend, metadata, self._kv)):
            return self._adapter.forward(self._embeds_TH[:size], self._positions_XT[:, :size], self._wanted_S)

    @staticmethod
    def worth(config: EngineConfig) -> bool:
        """True if steps can be as large as the smallest size."""
        return config.max_num_batched_tokens >= SIZES[0]

    def takes(self, batch: Batch) -> bool:
        """True if a graph can carry out this step; those with LoRA adapters go without."""
        metadata = batch.metadata
        return (
            batch.ids_T.shape[0] <= self._sizes[-1]
            and len(metadata.starts) <= _SEQUENCES
            and batch.wanted_S.shape[0] <= _SEQUENCES
            and not metadata.both_ways
            and not batch.lora_slots_T.any()
            and max(metadata.lengths[: metadata.num_decodes], default=0) <= _MOST_KEYS
        )

    def replay(self, batch: Batch, embeds_TH: Tensor) -> Tensor:
        """Logits (S, V) of a step that `takes` accepted; they stay valid until the next replay."""
        count, metadata = embeds_TH.shape[0], batch.metadata
        size = next(size for size in self._sizes if size >= count)
        num_sequences = len(metadata.starts)
        self._embeds_TH[:count].copy_(embeds_TH)
        self._embeds_TH[count:size].zero_()
        self._positions_XT[:, :count].copy_(batch.positions_XT)
        self._slots_GT[:, count:size].zero_()
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
