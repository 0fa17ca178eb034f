"""Attention written as plainly as can be, in float64: the oracle of torch_ref, which is every other backend's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, Further, GroupMetadata, LayerKV, LayerLatent
from beheld.attention.float8_kv import Float8KV, rounded


@dataclass
class Case:
    """A random step: what a backend is given, and the whole history that only the oracle sees."""

    q_THC: Tensor
    k_TKC: Tensor
    v_TKC: Tensor
    kv: LayerKV
    metadata: AttnMetadata
    history: list[tuple[Tensor, Tensor]]


def make_case(
    pieces: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    block_size: int = 8,
    window: int | None = None,
    chunk: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Case:
    """`pieces` are (start, stop) per sequence, those of one token first; earlier positions are in the cache already.

    Blocks are handed out in random order; those that no sequence reads hold NaN, as a freed block may.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-stop // block_size) for _, stop in pieces]
    order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
    blocks = sum(needed) + 4
    keys = torch.full((blocks, block_size, kv_heads, size), float("nan"))
    values = keys.clone()
    keys[0], values[0] = 0.0, 0.0
    tables = torch.zeros(len(pieces), max(needed), dtype=torch.int32)
    history, slots, new_k, new_v = [], [], [], []
    for b, (start, stop) in enumerate(pieces):
        own = [order.pop() for _ in range(needed[b])]
        tables[b, : needed[b]] = torch.tensor(own)
        k = torch.randn(stop, kv_heads, size, generator=generator).to(dtype)
        v = torch.randn(stop, kv_heads, size, generator=generator).to(dtype)
        history.append((k, v))
        first = 0 if window is None else max(0, start - window + 1)
        for position in range(stop):
            slot = own[position // block_size] * block_size + position % block_size
            if position >= start:
                slots.append(slot)
                new_k.append(k[position])
                new_v.append(v[position])
            elif position >= first:
                keys.view(-1, kv_heads, size)[slot] = k[position].float()
                values.view(-1, kv_heads, size)[slot] = v[position].float()
    total = len(slots)
    counts = [stop - start for start, stop in pieces]
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    metadata = AttnMetadata(
        num_decodes=sum(c == 1 for c in counts),
        starts=tuple(start for start, _ in pieces),
        lengths=tuple(stop for _, stop in pieces),
        lengths_B=torch.tensor([stop for _, stop in pieces], dtype=torch.int32, device=device),
        cu_q_B1=cu.to(device),
        groups=(GroupMetadata(torch.tensor(slots, device=device), tables.to(device), window, chunk=chunk),),
        block_size=block_size,
    )
    q = torch.randn(total, heads, size, generator=generator).to(dtype)
    kv = LayerKV(keys.to(device, dtype), values.to(device, dtype), 0)
    return Case(q.to(device), torch.stack(new_k).to(device), torch.stack(new_v).to(device), kv, metadata, history)


def in_float8(case: Case, factor: float = 1.0) -> Case:
    """The same case with keys and values in FP8; the history has the numbers that are kept.

    The step's own are given as they are, times `factor`: a backend rounds them.
    """
    k_TKC, v_TKC = case.k_TKC * factor, case.v_TKC * factor
    history, first = [], 0
    for start, (k, v) in zip(case.metadata.starts, case.history, strict=True):
        own = slice(first, first + len(k) - start)
        first = own.stop
        whole = (torch.cat((old[:start], new[own])) for old, new in ((k, k_TKC.to(k.device)), (v, v_TKC.to(v.device))))
        kept_k, kept_v = (rounded(each).to(each.dtype) for each in whole)
        history.append((kept_k, kept_v))
    kv = Float8KV(rounded(case.kv.keys), rounded(case.kv.values), case.kv.group)
    return Case(case.q_THC, k_TKC, v_TKC, kv, case.metadata, history)


def expected(
    case: Case,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
    bias_HD: Tensor | None = None,
    beside: Further | None = None,
) -> Tensor:
    """What attention must give, (T, H, C) in float64, one query and one head at a time."""
    group = case.metadata.groups[0]
    heads_per_kv = case.q_THC.shape[1] // case.k_TKC.shape[1]
    q = case.q_THC.cpu().double()
    out = torch.zeros(*q.shape[:2], case.v_TKC.shape[2], dtype=torch.float64)
    token = 0
    for (k, v), start, stop in zip(case.history, case.metadata.starts, case.metadata.lengths, strict=True):
        for position in range(start, stop):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            if group.chunk is not None:
                first = max(first, position - position % group.chunk)
            for head in range(q.shape[1]):
                seen = k[first : position + 1, head // heads_per_kv].double()
                scores = seen @ q[token, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if bias_HD is not None:
                    for index, place in enumerate(range(first, position + 1)):
                        scores[index] += bias_HD[head, min(position - place, bias_HD.shape[1] - 1)]
                if sinks_H is not None:
                    scores = torch.cat([scores, sinks_H[head : head + 1].double()])
                if beside is not None:
                    scores = torch.cat([scores, beside.sums_TH[token, head : head + 1].double()])
                weights = torch.softmax(scores, 0)
                out[token, head] = weights[: len(seen)] @ v[first : position + 1, head // heads_per_kv].double()
                if beside is not None:
                    out[token, head] += weights[-1] * beside.values_THC[token, head].double()
            token += 1
    return out


def share(case: Case, prefixes: dict[int, tuple[list[int], int]]) -> None:
    """Let sequences have the first positions of another: owner -> (sequences, positions, in whole blocks)."""
    group = case.metadata.groups[0]
    shared_B = torch.zeros(case.metadata.num_decodes, dtype=torch.int32, device=group.tables_BN.device)
    for owner, (sequences, count) in prefixes.items():
        num_blocks = count // case.metadata.block_size
        shared_B[[owner, *sequences]] = count
        for sequence in sequences:
            group.tables_BN[sequence, :num_blocks] = group.tables_BN[owner, :num_blocks]
            for own, of_owner in zip(case.history[sequence], case.history[owner], strict=True):
                own[:count] = of_owner[:count]
    group.shared_B = shared_B


def sinks(heads: int) -> Tensor:
    """A sink of each head: some matter little, some take nearly all of a query's weight."""
    return torch.linspace(-3.0, 4.0, heads)


@dataclass
class LatentCase:
    """A random step of latent attention; `expanded` is the same step with keys and values of all heads."""

    q_THC: Tensor
    latent_TW: Tensor
    up_HDR: Tensor
    kv: LayerLatent
    metadata: AttnMetadata
    expanded: Case

    def expected(self, scale: float) -> Tensor:
        """What attention must give, (T, H, V) in float64."""
        return expected(self.expanded, scale, None)


def make_latent_case(
    pieces: list[tuple[int, int]],
    *,
    heads: int = 4,
    rank: int = 24,
    rotary: int = 8,
    plain: int = 12,
    values: int = 20,
    block_size: int = 8,
    seed: int = 0,
) -> LatentCase:
    """See make_case."""
    case = make_case(pieces, heads=heads, kv_heads=1, size=rank + rotary, block_size=block_size, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    up_HDR = torch.randn(heads, plain + values, rank, generator=generator) / rank**0.5
    q_THC = torch.randn(len(case.q_THC), heads, plain + rotary, generator=generator)
    history = []
    for latent_L1W, _ in case.history:
        made_LHD = torch.einsum("lr,hdr->lhd", latent_L1W[:, 0, :rank].double(), up_HDR.double())
        rotary_LHP = latent_L1W[:, :, rank:].double().expand(-1, heads, -1)
        history.append((torch.cat([made_LHD[..., :plain], rotary_LHP], dim=2), made_LHD[..., plain:]))
    shape = q_THC.new_empty(len(q_THC), heads, plain + rotary), q_THC.new_empty(len(q_THC), heads, values)
    whole = Case(q_THC, *shape, case.kv, case.metadata, history)
    kv = LayerLatent(case.kv.keys.squeeze(2), rank, 0)
    return LatentCase(q_THC, case.k_TKC[:, 0], up_HDR, kv, case.metadata, whole)


def biases(heads: int, distances: int = 5) -> Tensor:
    """A bias of each head by distance, (H, D), large enough to matter."""
    return torch.randn(heads, distances, generator=torch.Generator().manual_seed(7)) * 2


def beside(num_tokens: int, heads: int, size: int) -> Further:
    """What each token also attends to: little, nearly all, or nothing."""
    generator = torch.Generator().manual_seed(8)
    sums_TH = torch.randn(num_tokens, heads, generator=generator) * 3 + 1
    values_THC = torch.randn(num_tokens, heads, size, generator=generator)
    sums_TH[0], values_THC[0] = float("-inf"), 0.0
    return Further(sums_TH, values_THC)
