"""Attention on the paged cache in plain PyTorch: the CPU backend, and the oracle of all other backends.

Shapes as in backend.py; G = H / K query heads share one key-value head; P tokens of one prefilling sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from beheld.attention import cpu_decode, cpu_prefill
from beheld.attention.backend import AttnMetadata, Further, GroupMetadata, LayerKV, LayerLatent, Sharing
from beheld.attention.dense_decode_cache import DenseDecodeCache, joined, left_by_sinks
from beheld.attention.latent import LatentTurn, absorbed, absorbs, expanded, raised, turned

# Scores of a prompt that are computed at a time, where PyTorch's own attention does not compute them.
_MOST_SCORES = 1 << 24


class TorchBackend:
    """Pads decoding sequences and computes them together; computes prefilling sequences one by one."""

    name = "torch"
    captures_prefill = False
    delta = None
    # Dense copies of decoding sequences would miss a column.
    stores_with_decodes = False
    sharing: Sharing | None = None

    def __init__(self) -> None:
        self._dense = DenseDecodeCache()

    def begin(self, metadata: AttnMetadata) -> None:
        """Compute once for all layers which slots are read and which of them are padding."""
        for index, group in enumerate(metadata.groups):
            # A tail is not a step: the dense copies must not take it for the next one.
            if metadata.num_decodes and metadata.sequences:
                group.extra["columns"] = self._dense.advance(index, metadata)
            group.extra["prefill"] = [
                _prefill_slots(metadata, group, b) for b in range(metadata.num_decodes, len(metadata.starts))
            ]

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
        bias_HD: Tensor | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Store, then attend; see AttentionBackend. What only this backend computes:

        Args:
            bias_HD: added to each head's scaled scores by the distance from a query back to the key; farther keys than
                D - 1 have the last.
            further: what the queries also attend to, with neither soft cap nor sinks.
        """
        group = metadata.groups[kv.group]
        if not metadata.stored:
            self.store(k_TKC, v_TKC, kv, metadata)
        k_TKC, v_TKC = kv.as_read(k_TKC, v_TKC)
        out_THC = q_THC.new_empty((*q_THC.shape[:2], v_TKC.shape[2]))
        decodes = metadata.num_decodes
        if decodes:
            rows = slice(decodes)
            out_THC[rows] = self._decodes(
                q_THC[rows], k_TKC[rows], v_TKC[rows], kv, metadata, group, scale, softcap, sinks_H, bias_HD,
                None if further is None else further.rows(rows),
            )  # fmt: skip
        token = decodes
        simple = softcap is None and sinks_H is None and bias_HD is None and further is None
        compiled = simple and cpu_prefill.attends(q_THC, kv, metadata.block_size)
        for sequence, (slots_L, mask_PL) in enumerate(group.extra["prefill"], start=decodes):
            count = metadata.lengths[sequence] - metadata.starts[sequence]
            rows = slice(token, token + count)
            token += count
            seen_2P = _seen_by_prompt(metadata, group, sequence) if compiled else None
            if seen_2P is not None:
                table_N, known = _tables(group)[sequence], metadata.lengths[sequence]
                cpu_prefill.attend(q_THC[rows], kv, table_N, seen_2P, known, scale, out_THC[rows])
                continue
            if slots_L is None:
                k_LKC, v_LKC = k_TKC[rows], v_TKC[rows]
            else:
                k_LKC, v_LKC = kv.read(slots_L, q_THC.dtype)
            own = None if further is None else further.rows(rows)
            out_THC[rows] = _prefill(q_THC[rows], k_LKC, v_LKC, mask_PL, scale, softcap, sinks_H, bias_HD, own)
        return out_THC

    def _decodes(
        self,
        q_BHC: Tensor,
        k_BKC: Tensor,
        v_BKC: Tensor,
        kv: LayerKV,
        metadata: AttnMetadata,
        group: GroupMetadata,
        scale: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
        bias_HD: Tensor | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Attend for the decoding sequences, whose keys and values are stored; returns (B, H, C)."""
        simple = softcap is None and (sinks_H is None or further is None)
        if simple and cpu_decode.attends(q_BHC, kv, metadata.block_size):
            bias_HL = None if bias_HD is None else _bias_rows(group, _seen(group, metadata), bias_HD)
            words = self.decode_words(group, metadata)
            return cpu_decode.attend(q_BHC, kv, words, scale, bias_HL, sinks_H, further)
        columns = group.extra.get("columns")
        if columns is not None and self._dense.take(kv, columns, q_BHC):
            return self._dense.attend(q_BHC, k_BKC, v_BKC, kv, columns, scale, softcap, sinks_H, bias_HD, further)
        if "decode" not in group.extra:
            group.extra["decode"] = _decode_slots(metadata, group)
        slots_BL, hidden_BL = group.extra["decode"]
        return _decode(q_BHC, kv, slots_BL, hidden_BL, scale, softcap, sinks_H, bias_HD, further)

    def decode_words(self, group: GroupMetadata, metadata: AttnMetadata) -> cpu_decode.SequenceWords:
        """Return the words of a step's decoding sequences, made once for all layers of a group."""
        if "words" not in group.extra:
            seen = _seen(group, metadata)
            group.extra["words"] = cpu_decode.SequenceWords(
                group.tables_BN, seen, metadata.block_size, group.slots_T[: metadata.num_decodes]
            )
        words: cpu_decode.SequenceWords = group.extra["words"]
        return words

    def attend_latent(
        self, q_THC: Tensor, latent_TW: Tensor, up_HDR: Tensor, kv: LayerLatent, metadata: AttnMetadata, scale: float
    ) -> Tensor:
        """Decoding sequences absorb; prompts do what costs less; see AttentionBackend."""
        group = metadata.groups[kv.group]
        if not metadata.stored:
            self.store_latent(latent_TW, kv, metadata)
        rank, width = kv.rank, latent_TW.shape[1]
        plain = q_THC.shape[2] - (width - rank)
        out_THV = q_THC.new_empty((*q_THC.shape[:2], up_HDR.shape[1] - plain))
        decodes = metadata.num_decodes
        if decodes:
            own_B1W = latent_TW[:decodes].unsqueeze(1)
            q_BHW = absorbed(q_THC[:decodes], up_HDR, width - rank)
            seen_BHR = self._decodes(q_BHW, own_B1W, own_B1W[..., :rank], kv.shared, metadata, group, scale)
            out_THV[:decodes] = raised(seen_BHR, up_HDR, plain)
        token = decodes
        for sequence, (slots_L, mask_PL) in enumerate(group.extra["prefill"], start=decodes):
            count = metadata.lengths[sequence] - metadata.starts[sequence]
            rows = slice(token, token + count)
            q_PHC = q_THC[rows]
            latent_LW = latent_TW[rows] if slots_L is None else kv.latents.flatten(0, 1).index_select(0, slots_L)
            latent_LW = latent_LW.to(q_PHC.dtype)
            if absorbs(count, q_PHC.shape[2], up_HDR, width):
                seen_PHR = _prefill_shared(absorbed(q_PHC, up_HDR, width - rank), latent_LW, rank, mask_PL, scale)
                out_THV[rows] = raised(seen_PHR, up_HDR, plain)
            else:
                k_LHC, v_LHV = expanded(latent_LW, up_HDR, plain)
                # PyTorch's fast attention has values as large as keys.
                v_LHC = F.pad(v_LHV, (0, max(0, k_LHC.shape[2] - v_LHV.shape[2])))
                out_PHC = _prefill(q_PHC, k_LHC, v_LHC, mask_PL, scale, None, None)
                out_THV[rows] = out_PHC[..., : v_LHV.shape[2]]
            token += count
        return out_THV

    def attend_latent_row(
        self,
        q_HC: Tensor,
        latent_W: Tensor,
        turn: LatentTurn,
        up_HDR: Tensor,
        kv: LayerLatent,
        metadata: AttnMetadata,
        scale: float,
    ) -> Tensor:
        """See AttentionBackend."""
        q_1HC, latent_1W = turned(q_HC.unsqueeze(0), latent_W.unsqueeze(0), turn)
        return self.attend_latent(q_1HC, latent_1W, up_HDR, kv, metadata, scale)[0]

    def store_latent(self, latent_TW: Tensor, kv: LayerLatent, metadata: AttnMetadata) -> None:
        """See AttentionBackend."""
        slots_T = metadata.groups[kv.group].slots_T
        kv.latents.flatten(0, 1).index_copy_(0, slots_T, latent_TW.to(kv.latents.dtype))

    def outside_graphs(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """See AttentionBackend: no graph contains prompts."""
        return False

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """See AttentionBackend."""
        kv.write(metadata.groups[kv.group].slots_T, k_TKC, v_TKC)


def _decode_slots(metadata: AttnMetadata, group: GroupMetadata) -> tuple[Tensor, Tensor | None]:
    """Return the slots (B, L) that decoding sequences read, and which of them are padding (None if none is).

    A window keeps only the last positions: position p of sequence b is in column p - (length_b - L_b). A chunk keeps
    positions from its start on.
    """
    lengths = metadata.lengths[: metadata.num_decodes]
    seen = [_seen_from(n - 1, group) for n in lengths]
    longest = max(seen)
    device = group.tables_BN.device
    first_B1 = torch.tensor([n - s for n, s in zip(lengths, seen, strict=True)], device=device).unsqueeze(1)
    positions_BL = torch.arange(longest, device=device).unsqueeze(0) + first_B1
    hidden_BL = positions_BL >= torch.tensor(lengths, device=device).unsqueeze(1)
    positions_BL.masked_fill_(hidden_BL, 0)
    blocks_BL = group.tables_BN[: metadata.num_decodes].long().gather(1, positions_BL // metadata.block_size)
    slots_BL = blocks_BL * metadata.block_size + positions_BL % metadata.block_size
    # Padding reads slot 0 of the null block, which is never written: a freed block may hold NaN, and 0 * NaN is NaN.
    slots_BL.masked_fill_(hidden_BL, 0)
    return slots_BL, None if min(seen) == longest else hidden_BL


def _seen(group: GroupMetadata, metadata: AttnMetadata) -> list[tuple[int, int]]:
    """Return the positions that each decoding sequence sees, a first and a stop."""
    if "seen" not in group.extra:
        lengths = metadata.lengths[: metadata.num_decodes]
        group.extra["seen"] = [(n - _seen_from(n - 1, group), n) for n in lengths]
    found: list[tuple[int, int]] = group.extra["seen"]
    return found


def _bias_rows(group: GroupMetadata, seen_BL: list[tuple[int, int]], bias_HD: Tensor) -> Tensor:
    """Return biases by distance as compiled attention reads them, made once for layers that share them."""
    known, rows_HL = group.extra.get("bias rows", (None, None))
    if known is not bias_HD or rows_HL is None:
        rows_HL = cpu_decode.bias_rows(bias_HD, max(stop - first for first, stop in seen_BL))
        group.extra["bias rows"] = bias_HD, rows_HL
    made: Tensor = rows_HL
    return made


def _seen_from(position: int, group: GroupMetadata) -> int:
    """Return how many positions a query sees, its own included."""
    if group.chunk is not None:
        return position % group.chunk + 1
    return min(position + 1, group.window) if group.window else position + 1


def _tables(group: GroupMetadata) -> Tensor:
    """Return the group's block tables in int32, rows next to each other."""
    if "int32 tables" not in group.extra:
        group.extra["int32 tables"] = group.tables_BN.to(torch.int32).contiguous()
    found: Tensor = group.extra["int32 tables"]
    return found


def _seen_by_prompt(metadata: AttnMetadata, group: GroupMetadata, b: int) -> Tensor | None:
    """Return the first position that each of a prompt's queries sees, and the stop after its last: int64 (2, P).

    None where a query also sees positions later than its own.
    """
    if metadata.both_ways and group.ahead != "never" and metadata.both_ways[b]:
        return None
    known: dict[int, Tensor] = group.extra.setdefault("seen by prompts", {})
    if b not in known:
        stops_P = torch.arange(metadata.starts[b], metadata.lengths[b]) + 1
        firsts_P = torch.zeros_like(stops_P) if group.window is None else (stops_P - group.window).clamp_(min=0)
        if group.chunk is not None:
            firsts_P = torch.maximum(firsts_P, (stops_P - 1) // group.chunk * group.chunk)
        known[b] = torch.stack([firsts_P, stops_P])
    return known[b]


def _prefill_slots(metadata: AttnMetadata, group: GroupMetadata, b: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the slots (L,) that sequence `b` reads and its mask (P, L); no slots if it reads only this step's tokens.

    Query i is at position start + i and sees the positions up to itself, at most `window` of them, or of its chunk:

        position   first .. start .. start+i .. length-1
        query i      1  ..   1   ..    1     0 .. 0

    Within a both-ways range, a query also sees later positions; with joint ranges, those of all ranges. No window hides
    what is in a whole range.
    """
    start, length = metadata.starts[b], metadata.lengths[b]
    first = max(0, start - group.window + 1) if group.window else 0
    device = group.tables_BN.device
    plain = group.window is None or length <= group.window
    ranges = metadata.both_ways[b] if metadata.both_ways and group.ahead != "never" else ()
    if start == 0 and plain and not ranges:
        return None, None
    positions_L = torch.arange(first, length, device=device)
    queries_P1 = torch.arange(start, length, device=device).unsqueeze(1)
    mask_PL = positions_L <= queries_P1
    pairs = product(ranges, ranges) if group.ahead == "joint" else [(own, own) for own in ranges]
    for (low, high), (begin, end) in pairs:
        mask_PL[low - start : high - start, begin - first : end - first] = True
    if not plain:
        assert group.window is not None
        mask_PL &= positions_L > queries_P1 - group.window
        if group.chunk is not None:
            mask_PL &= positions_L >= queries_P1 // group.chunk * group.chunk
    if group.ahead == "whole":
        for low, high in ranges:
            mask_PL[low - start : high - start, low - first : high - first] = True
    if start == 0:
        return None, mask_PL
    blocks_L = group.tables_BN[b].long()[positions_L // metadata.block_size]
    return blocks_L * metadata.block_size + positions_L % metadata.block_size, mask_PL


def _decode(
    q_BHC: Tensor,
    kv: LayerKV,
    slots_BL: Tensor,
    hidden_BL: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    bias_HD: Tensor | None = None,
    further: Further | None = None,
) -> Tensor:
    """Attend one query per sequence to its whole context; returns (B, H, C)."""
    B, L = slots_BL.shape
    K = kv.keys.shape[2]
    both = kv.read(slots_BL.flatten(), q_BHC.dtype)
    k_BKLC, v_BKLC = (each.view(B, L, K, -1).transpose(1, 2) for each in both)
    # Query heads that share a key are laid out as queries of one head, so that keys are read in place and never
    # repeated.
    q_BKGC = q_BHC.unflatten(1, (K, -1)).to(k_BKLC.dtype)
    if softcap is None and sinks_H is None and bias_HD is None and further is None:
        mask_BKGL = None
        if hidden_BL is not None:
            mask_BL = torch.zeros(B, L, dtype=k_BKLC.dtype, device=slots_BL.device)
            mask_BKGL = mask_BL.masked_fill_(hidden_BL, float("-inf"))[:, None, None].expand(B, 1, q_BKGC.shape[2], L)
        out_BKGC = F.scaled_dot_product_attention(q_BKGC, k_BKLC, v_BKLC, attn_mask=mask_BKGL, scale=scale)
        return out_BKGC.flatten(1, 2).to(q_BHC.dtype)
    scores_BKGL = torch.matmul(q_BKGC * scale, k_BKLC.transpose(2, 3)).float()
    if softcap is not None:
        scores_BKGL = softcap * torch.tanh(scores_BKGL / softcap)
    if bias_HD is not None:
        columns_L = torch.arange(L, device=slots_BL.device)
        ends_B = L if hidden_BL is None else L - hidden_BL.sum(1, keepdim=True)
        distances_BL = (ends_B - 1 - columns_L).clamp(0, bias_HD.shape[1] - 1).expand(B, L)
        scores_BKGL += bias_HD[:, distances_BL].transpose(0, 1).unflatten(1, (K, -1))
    if hidden_BL is not None:
        scores_BKGL.masked_fill_(hidden_BL[:, None, None, :], float("-inf"))
    weights_BKGL = torch.softmax(scores_BKGL, dim=-1).to(v_BKLC.dtype)
    out_BKGC = torch.matmul(weights_BKGL, v_BKLC)
    if sinks_H is not None:
        out_BKGC *= left_by_sinks(scores_BKGL, sinks_H.view(K, -1))
    if further is not None:
        out_BKGC = joined(out_BKGC, scores_BKGL, further.sums_TH, further.values_THC)
    return out_BKGC.flatten(1, 2).to(q_BHC.dtype)


def _prefill(
    q_PHC: Tensor,
    k_LKC: Tensor,
    v_LKC: Tensor,
    mask_PL: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
    bias_HD: Tensor | None = None,
    further: Further | None = None,
) -> Tensor:
    """Attend one sequence's P new tokens, the last of L positions, causally to all of them; returns (P, H, C)."""
    G = q_PHC.shape[1] // k_LKC.shape[1]
    q_HPC = q_PHC.transpose(0, 1)
    k_HLC = k_LKC.to(q_PHC.dtype).repeat_interleave(G, dim=1).transpose(0, 1)
    v_HLC = v_LKC.to(q_PHC.dtype).repeat_interleave(G, dim=1).transpose(0, 1)
    if softcap is None and sinks_H is None and bias_HD is None and further is None:
        out = F.scaled_dot_product_attention(
            q_HPC[None], k_HLC[None], v_HLC[None], attn_mask=mask_PL, is_causal=mask_PL is None, scale=scale
        )
        return out[0].transpose(0, 1)
    if mask_PL is None:
        mask_PL = torch.ones(q_HPC.shape[1], k_HLC.shape[1], dtype=torch.bool, device=q_HPC.device).tril()
    out_PHC = q_PHC.new_empty((*q_PHC.shape[:2], v_HLC.shape[2]))
    rows = max(1, _MOST_SCORES // (k_HLC.shape[0] * k_HLC.shape[1]))
    distances_PL = None
    if bias_HD is not None:
        P, L = mask_PL.shape
        places_L = torch.arange(L, device=q_HPC.device)
        distances_PL = (places_L[L - P :, None] - places_L).clamp_(0, bias_HD.shape[1] - 1)
    for first, own_HPC, seen_PL, out in zip(
        range(0, len(q_PHC), rows), q_HPC.split(rows, 1), mask_PL.split(rows), out_PHC.split(rows), strict=True
    ):
        own = slice(first, first + rows)
        scores_HPL = torch.matmul(own_HPC * scale, k_HLC.transpose(1, 2)).float()
        if softcap is not None:
            scores_HPL = softcap * torch.tanh(scores_HPL / softcap)
        if bias_HD is not None and distances_PL is not None:
            scores_HPL += bias_HD[:, distances_PL[own]]
        scores_HPL.masked_fill_(~seen_PL, float("-inf"))
        own_out_HPC = torch.matmul(torch.softmax(scores_HPL, dim=-1).to(v_HLC.dtype), v_HLC)
        if sinks_H is not None:
            own_out_HPC *= left_by_sinks(scores_HPL, sinks_H[:, None])
        if further is not None:
            sums_PH, values_PHC = further.rows(own)
            own_out_HPC = joined(own_out_HPC, scores_HPL, sums_PH.T, values_PHC.transpose(0, 1))
        out.copy_(own_out_HPC.transpose(0, 1))
    return out_PHC


def _prefill_shared(q_PHW: Tensor, latent_LW: Tensor, rank: int, mask_PL: Tensor | None, scale: float) -> Tensor:
    """Attend one sequence's P new tokens to L latents, which all heads share; returns (P, H, R)."""
    P, H, W = q_PHW.shape
    if mask_PL is None:
        mask_PL = torch.ones(P, len(latent_LW), dtype=torch.bool, device=q_PHW.device).tril()
    # Heads that share a key are laid out as queries of one head, so that latents are never repeated.
    mask_RL = mask_PL.repeat_interleave(H, dim=0)
    latent_11LW = latent_LW[None, None]
    out = F.scaled_dot_product_attention(
        q_PHW.reshape(1, 1, P * H, W), latent_11LW, latent_11LW, attn_mask=mask_RL, scale=scale
    )
    return out.view(P, H, W)[..., :rank]
