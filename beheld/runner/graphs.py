"""Graphs of the decode step, for a ladder of batch sizes.

A graph replays what was captured, on the same addresses. All that changes between steps is in a few tensors that stay
in place: which rows decode, their lengths, positions and slots (one small copy a step), the block tables of all rows
(only changes are copied), and the rows' newest tokens, which never leave the device.

Shapes: B sequences of a batch (padded to a size of the ladder), R rows, G KV groups, N blocks of a table, X position
axes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from beheld.attention.backend import AttentionBackend, AttnMetadata, LayerCache, LayerKey
from beheld.attention.context import ForwardContext, forward_context
from beheld.core.config import EngineConfig
from beheld.core.plan import SeqSlice
from beheld.models.adapter import ModelAdapter
from beheld.platform.platform import Graph
from beheld.platform.registry import platform_of
from beheld.runner.cache.cache import DeviceCaches
from beheld.runner.capture import capture
from beheld.runner.rows import Rows
from beheld.runner.shared_prefixes import SharedPrefixes
from beheld.runner.staging import Ring, to_device
from beheld.sample.sampler import greedy
from beheld.utils.log import get_logger

logger = get_logger(__name__)

# Rows of the small input: which row, its length, its position, its LoRA slot, where its newest token stands and where
# the next one will (Rows.newest_places), how many positions it shares with neighbours, then one slot per KV group.
_FIELDS = 7
# Sequences from which on graphs for shared prefixes are captured, of few sizes.
_MIN_SHARING = 16
# Graphs of more rows share one place for their logits, which costs a copy: 1,024 rows take half a gigabyte for a
# vocabulary of 262,144, and each graph would keep its own.
_OWN_LOGITS = 512


def ladder(most: int) -> list[int]:
    """Batch sizes to capture: each takes time at the start, and products are computed in tiles of 64 rows or more."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    while sizes[-1] < most:
        # From 512 on an eighth of the power of two below: no step is padded by more, and few sizes reach far.
        sizes.append(sizes[-1] + max(64, (1 << sizes[-1].bit_length()) // 16))
    return [size for size in sizes if size < most] + [most]


def sharing_ladder(most: int) -> list[int]:
    """Batch sizes to capture for sequences that share prefixes."""
    return [size for size in ladder(most) if size >= _MIN_SHARING and (size & (size - 1) == 0 or size == most)]


def kept_rows(most: int, num_kinds: int, *, sharing: bool) -> int:
    """Rows of logits that the graphs of up to `most` sequences keep, with or without adapters (`num_kinds`), and with
    graphs for shared prefixes (`sharing`) or without."""
    sizes = ladder(most)
    shared = sizes[-1] if _shares_logits(sizes[-1]) else 0
    own = num_kinds * sum(size for size in sizes if not _shares_logits(size))
    if sharing:
        own += sum(size for size in sharing_ladder(most) if not _shares_logits(size))
    return own + shared


def _shares_logits(size: int) -> bool:
    return size > _OWN_LOGITS


class DecodeGraphs:
    """Captures and replays decode steps.

    Attributes:
        tables_GRN: block tables on the device; right after `refresh_tables`.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        backend: AttentionBackend,
        kv: dict[LayerKey, LayerCache],
        caches: DeviceCaches,
        config: EngineConfig,
        rows: Rows,
    ) -> None:
        self._adapter, self._backend, self._kv = adapter, backend, kv
        self._caches, self._num_groups = caches, len(caches.tables)
        self._axes = adapter.info.position_axes
        self._block_size = config.block_size
        self._rows = rows
        self._sizes = ladder(config.max_num_seqs)
        self._sharing_sizes = sharing_ladder(config.max_num_seqs)
        device, most = adapter.device, self._sizes[-1]
        fields = _FIELDS + self._num_groups
        self._input_FB = torch.zeros(fields, most, dtype=torch.int64, device=device)
        self._ring = Ring(lambda pinned: torch.zeros(fields, most, dtype=torch.int64, pin_memory=pinned), device)
        self._bounds_B1 = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.tables_GRN = torch.tensor(rows.tables_GRN, device=device)
        self._logits_BV: Tensor | None = None
        # By whether rows may have LoRA adapters or share prefixes, and by size.
        self._kinds = ("plain",) if adapter.lora is None else ("plain", "lora")
        self._prefixes = self._find_prefixes(config) if config.prefix_caching else None
        self._graphs: dict[tuple[str, int], tuple[Graph, tuple[Tensor, tuple[Tensor, Tensor]]]] = {}
        none, turn = np.zeros(0, dtype=np.int64), self._ring.turn()
        self._fill(self._ring.buffers[turn].numpy(), none, none)
        self._ring.send(turn, self._input_FB)

    def capture(self, *, show_progress: bool) -> None:
        """Capture every size, the largest first, so that the others fit into its memory."""
        wanted = [(kind, size) for size in reversed(self._sizes) for kind in self._kinds]
        # A single row is compiled apart, and so are adapters.
        first = [*((kind, 1) for kind in self._kinds), *((kind, self._sizes[-1]) for kind in self._kinds)]
        if self._prefixes is not None:
            sharing = [("sharing", size) for size in reversed(self._sharing_sizes)]
            wanted += sharing
            first += sharing[:1]
        self._graphs = capture(
            wanted,
            self._step,
            platform=platform_of(self._adapter.device),
            first=first,
            show_progress=show_progress,
            name="CUDA graphs",
        )

    def _step(self, wanted: tuple[str, int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The decode step itself, on the tensors that stay in place: logits (B, V), and what `greedy` makes of them."""
        kind, size = wanted
        rows_B, lengths_B, position_B, slots_B, newest_B, _, shared_B = self._input_FB[:_FIELDS, :size]
        ids_B = self._rows.newest_P.index_select(0, newest_B)
        slots_GB = [self._input_FB[_FIELDS + index, :size] for index in range(self._num_groups)]
        tables_GBN = [self.tables_GRN[index].index_select(0, rows_B) for index in range(self._num_groups)]
        metadata = AttnMetadata(
            num_decodes=size,
            starts=(0,) * size,
            lengths=(1,) * size,
            lengths_B=lengths_B.int(),
            cu_q_B1=self._bounds_B1[: size + 1],
            # Only a single row's kernels start early and can do something before it is their turn.
            groups=self._caches.metadata(slots_GB, tables_GBN, early=size == 1),
            block_size=self._block_size,
        )
        if kind == "sharing":
            for index in self._unwindowed:
                metadata.groups[index].shared_B = shared_B.int()
        self._backend.begin(metadata)
        lora = self._adapter.lora.slots(slots_B) if kind == "lora" and self._adapter.lora is not None else None
        with forward_context(ForwardContext(self._backend, metadata, self._kv, lora)):
            embeds_BH = self._adapter.embed(ids_B)
            # Lying as in any other step: rotations of a single row would be compiled once more for that.
            positions_XB = position_B.expand(self._axes, size).contiguous()
            logits_BV = self._adapter.logits(self._adapter.hidden(embeds_BH, positions_XB))
        if _shares_logits(size):
            if self._logits_BV is None:
                # In the first pass of the largest size, which is not captured.
                self._logits_BV = torch.empty_like(logits_BV)
            logits_BV = self._logits_BV[:size].copy_(logits_BV)
        return logits_BV, greedy(logits_BV)

    def replay(self, slices: Sequence[SeqSlice]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]] | None:
        """Replay a step in which every slice decodes: logits (B, V), where in Rows.newest_P the tokens sampled from
        them go (B), and what `greedy` makes of them. They stay valid until the next replay.

        None if no graph can carry out this step.
        """
        count = len(slices)
        if count > self._sizes[-1] or any(s.stop - s.start != 1 for s in slices):
            return None
        rows = np.fromiter((s.row for s in slices), dtype=np.int64, count=count)
        starts = np.fromiter((s.start for s in slices), dtype=np.int64, count=count)
        if (starts < self._rows.known_R[rows]).any() or (starts < self._rows.media_stop_R[rows]).any():
            return None
        kind, sizes, shared = "plain", self._sizes, None
        if self._rows.lora_slots_R[rows].any():
            kind = "lora"
        elif self._prefixes is not None and count >= _MIN_SHARING:
            shared = self._prefixes.find(rows, starts)
            if shared is not None:
                kind, sizes = "sharing", self._sharing_sizes
        size = next(size for size in sizes if size >= count)
        self.refresh_tables()
        turn = self._ring.turn()
        self._fill(self._ring.buffers[turn].numpy(), rows, starts, shared)
        self._ring.send(turn, self._input_FB)
        graph, (logits_BV, (ids_B, nan_B)) = self._graphs[kind, size]
        graph.replay()
        return logits_BV[:count], self._input_FB[5, :count], (ids_B[:count], nan_B[:count])

    def refresh_tables(self) -> None:
        """Bring the device's block tables up to date."""
        changes = self._rows.changes()
        if changes is None:
            return
        # Forgotten only after the copy was launched: a step that fails earlier is launched again with all changes.
        index, values = to_device({"changes": changes}, self.tables_GRN.device)["changes"]
        self.tables_GRN.view(-1).index_copy_(0, index, values.int())
        self._rows.forget_changes()

    def _find_prefixes(self, config: EngineConfig) -> SharedPrefixes | None:
        """What looks for shared prefixes; None if the backend takes no notice of them, or there are too few rows."""
        if self._backend.sharing is None or not self._sharing_sizes:
            return None
        # Windows may begin within a prefix.
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=self._adapter.device)
        groups = self._caches.metadata([nothing[0]] * self._num_groups, [nothing] * self._num_groups)
        self._unwindowed = [i for i, group in enumerate(groups) if group.window is None and group.chunk is None]
        return SharedPrefixes(self._rows, self._unwindowed, config.block_size, self._backend.sharing)

    def _fill(self, fields: np.ndarray, rows: np.ndarray, starts: np.ndarray, shared: np.ndarray | None = None) -> None:
        """Write one step's small input; padding has length 1 and slot 0, so it reads and writes nothing that counts."""
        count, size = len(rows), self._block_size
        fields[:, count:] = 0
        fields[6] = 0
        fields[1, count:] = 1
        fields[0, :count] = rows
        fields[1, :count] = starts + 1
        fields[2, :count] = self._rows.position_of(starts, self._rows.delta_R[rows])
        fields[3, :count] = self._rows.lora_slots_R[rows]
        fields[4, :count] = self._rows.newest_places(rows, starts)
        fields[5, :count] = self._rows.newest_places(rows, starts + 1)
        if shared is not None:
            fields[6, :count] = shared
        for index in range(self._num_groups):
            blocks = self._rows.tables_GRN[index, rows, starts // size]
            fields[_FIELDS + index, :count] = blocks.astype(np.int64) * size + starts % size
