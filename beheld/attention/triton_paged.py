"""Attention on the paged cache in Triton kernels: the backend of NVIDIA GPUs.

One launch per layer if all sequences decode (it stores, attends and joins), and two more if some prefill: store, and
attend. Nothing is read back to the host. The decoding part reads every number that changes between steps from device
tensors, so that a CUDA graph may contain it: capture `begin` and the layers with tensors that stay in place (lengths_B,
tables_BN, slots_T) and change their contents between replays. Rows that pad such a graph have length 1 and slot 0: they
read nothing, write nothing to the cache, and their output is their new value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from beheld.attention import triton_latent
from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV, LayerLatent, Sharing
from beheld.attention.latent import LatentTurn, absorbed, expanded, raised
from beheld.attention.store import store
from beheld.attention.triton_decode import DecodePlan, can_share, decode, plan_decode
from beheld.attention.triton_delta import TritonDelta
from beheld.attention.triton_prefill import (
    PrefillPlan,
    make_ranges,
    make_tiles,
    make_tiles_on_device,
    prefill,
    shape_of,
)
from beheld.attention.triton_shared import SHARING
from beheld.platform.platform import KernelFacts
from beheld.platform.registry import platform_of

hopper_prefill: Any
try:
    from beheld.attention import hopper_prefill
except (ImportError, AttributeError):
    # This Triton lacks parts of Gluon, in which the kernel for long prompts is written.
    hopper_prefill = None

# Launching a step takes the host longer than fewer tokens take the device.
_OUTSIDE_GRAPHS = 1024
# Programs of the decode kernel that run concurrently on one multiprocessor.
_PROGRAMS_PER_SM = 3


class TritonBackend:
    """See AttentionBackend; heads of 16 to 512 elements, any group size, block sizes that are powers of two."""

    name = "triton"
    captures_prefill = True
    stores_with_decodes = True
    sharing: Sharing | None = SHARING

    def __init__(self) -> None:
        self.delta = TritonDelta()
        self._facts: dict[torch.device, KernelFacts] = {}
        # Some layer's long prompts have a kernel of their own, which no graph contains.
        self._computes_long = False

    def begin(self, metadata: AttnMetadata) -> None:
        """Forget what the groups' layers shared in an earlier step with the same metadata."""
        for group in metadata.groups:
            group.extra.clear()
            if group.kv_heads is not None and metadata.num_decodes:
                self._decode_plan(metadata, group, group.kv_heads).settled = True

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
        """Store, then attend; see AttentionBackend."""
        group = metadata.groups[kv.group]
        q_THC, k_TKC, v_TKC = _dense_heads(q_THC), _dense_heads(k_TKC), _dense_heads(v_TKC)
        out_THC = q_THC.new_empty((*q_THC.shape[:2], v_TKC.shape[2]))
        decodes = metadata.num_decodes
        if decodes:
            plan = self._decode_plan(metadata, group, kv.keys.shape[2], (q_THC.shape[1], q_THC.shape[2]))
            early = self._facts_of(q_THC.device).early_launch
            decode(q_THC, k_TKC, v_TKC, out_THC, kv, group, plan, scale, softcap, sinks_H, early=early)
        if len(metadata.starts) > decodes:
            if decodes:
                store(k_TKC[decodes:], v_TKC[decodes:], kv, group.slots_T[decodes:])
            else:
                store(k_TKC, v_TKC, kv, group.slots_T)
            if softcap is None and sinks_H is None and self._for_long(metadata, group, q_THC, k_TKC, v_TKC, kv):
                tiles_L8 = self._long_tiles(metadata, group, q_THC, kv.keys.shape[2])
                hopper_prefill.prefill(q_THC, k_TKC, v_TKC, out_THC, kv, group, tiles_L8, scale)
                return out_THC
            prefill_plan = self._prefill_plan(metadata, group, q_THC, kv.keys.shape[2])
            k_TKC, v_TKC = kv.as_read(k_TKC, v_TKC)
            prefill(q_THC, k_TKC, v_TKC, out_THC, kv, group, prefill_plan, scale, softcap, sinks_H)
        return out_THC

    def _for_long(
        self,
        metadata: AttnMetadata,
        group: GroupMetadata,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
        kv: LayerKV,
    ) -> bool:
        """Return whether the kernel for long prompts computes this layer's prompts; its trial is at the first layer."""
        if hopper_prefill is None or not self._facts_of(q_THC.device).warpgroup_products:
            return False
        plain = metadata.starts_B is None and group.window is None and group.chunk is None
        plain = plain and (group.ahead == "never" or not any(metadata.both_ways))
        if not plain or not hopper_prefill.takes(q_THC, k_TKC, v_TKC, kv):
            return False
        self._computes_long = True
        long = group.extra.get("long")
        if long is None:
            first = metadata.num_decodes
            pieces = zip(metadata.starts[first:], metadata.lengths[first:], strict=True)
            long = group.extra["long"] = hopper_prefill.is_long(pieces)
        return bool(long)

    def _long_tiles(self, metadata: AttnMetadata, group: GroupMetadata, q_THC: Tensor, kv_heads: int) -> Tensor:
        """Return the tiles of a group's prompts for the kernel for long ones, made by its first layer."""
        tiles_L8 = group.extra.get("long_tiles")
        if tiles_L8 is None:
            heads = q_THC.shape[1] // kv_heads
            tiles_L8 = group.extra["long_tiles"] = make_tiles(
                metadata, heads, hopper_prefill.rows_of_tile(), q_THC.shape[0]
            )
        assert isinstance(tiles_L8, Tensor)
        return tiles_L8

    def outside_graphs(self, pieces: Sequence[tuple[int, int]]) -> bool:
        """See AttentionBackend."""
        tokens = sum(stop - start for start, stop in pieces)
        return self._computes_long and tokens >= _OUTSIDE_GRAPHS and hopper_prefill.is_long(pieces)

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """See AttentionBackend."""
        store(_dense_heads(k_TKC), _dense_heads(v_TKC), kv, metadata.groups[kv.group].slots_T)

    def attend_latent(
        self, q_THC: Tensor, latent_TW: Tensor, up_HDR: Tensor, kv: LayerLatent, metadata: AttnMetadata, scale: float
    ) -> Tensor:
        """Prompts without prefixes are expanded, all else is absorbed; see AttentionBackend."""
        group = metadata.groups[kv.group]
        heads, both, _ = up_HDR.shape
        rotary = latent_TW.shape[1] - kv.rank
        plain = q_THC.shape[2] - rotary
        latent_TW = latent_TW if latent_TW.stride(1) == 1 else latent_TW.contiguous()
        out_THV = q_THC.new_empty((*q_THC.shape[:2], both - plain))
        decodes = metadata.num_decodes
        if decodes:
            plan = self._latent_plan(metadata, group, heads)
            early = self._facts_of(q_THC.device).early_launch
            if decodes == 1 and up_HDR.is_contiguous():
                q_BHW = triton_latent.absorb_row(_dense_heads(q_THC)[0], up_HDR, rotary, early=early)
            else:
                q_BHW = absorbed(q_THC[:decodes], up_HDR, rotary)
            seen_BHR = triton_latent.decode(q_BHW, latent_TW, kv, group, plan, scale, early=early)
            if decodes == 1 and up_HDR.is_contiguous():
                triton_latent.raise_row(seen_BHR, up_HDR, plain, out_THV[0], early=early)
            else:
                out_THV[:decodes] = raised(seen_BHR, up_HDR, plain)
        if len(metadata.starts) > decodes:
            triton_latent.store(latent_TW[decodes:], kv, group.slots_T[decodes:])
            if any(metadata.starts[decodes:]):
                self._absorb_prompts(q_THC, up_HDR, kv, metadata, group, scale, out_THV)
            else:
                k_THC, v_THV = expanded(latent_TW, up_HDR, plain)
                nothing = triton_latent.nothing_cached(kv, k_THC, v_THV)
                prefill_plan = self._prefill_plan(metadata, group, q_THC, heads)
                prefill(_dense_heads(q_THC), k_THC, v_THV, out_THV, nothing, group, prefill_plan, scale, None)
        return out_THV

    def _absorb_prompts(
        self,
        q_THC: Tensor,
        up_HDR: Tensor,
        kv: LayerLatent,
        metadata: AttnMetadata,
        group: GroupMetadata,
        scale: float,
        out_THV: Tensor,
    ) -> None:
        """Attend for prefilling sequences, whose latents are stored; writes their rows of `out_THV`."""
        heads, decodes = q_THC.shape[1], metadata.num_decodes
        rotary = kv.latents.shape[2] - kv.rank
        rows = triton_latent.rows_of(kv.latents.element_size(), self._facts_of(q_THC.device).shared_bytes)
        tiles_L8 = group.extra.get("absorbed")
        if tiles_L8 is None:
            make = make_tiles if metadata.starts_B is None else make_tiles_on_device
            tiles_L8 = group.extra["absorbed"] = make(metadata, heads, rows, q_THC.shape[0])
        q_THW = absorbed(q_THC, up_HDR, rotary)
        seen_THR = q_THW.new_empty((*q_THW.shape[:2], kv.rank))
        triton_latent.prefill(q_THW, kv, group, tiles_L8, rows, seen_THR, scale)
        out_THV[decodes:] = raised(seen_THR[decodes:], up_HDR, q_THC.shape[2] - rotary)

    def store_latent(self, latent_TW: Tensor, kv: LayerLatent, metadata: AttnMetadata) -> None:
        """See AttentionBackend."""
        latent_TW = latent_TW if latent_TW.stride(1) == 1 else latent_TW.contiguous()
        triton_latent.store(latent_TW, kv, metadata.groups[kv.group].slots_T)

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
        """Turning, storing and absorbing are one launch; see AttentionBackend."""
        group = metadata.groups[kv.group]
        heads, both, _ = up_HDR.shape
        plain = q_HC.shape[1] - turn.cos_P.numel()
        early = self._facts_of(q_HC.device).early_launch
        plan = self._latent_plan(metadata, group, heads)
        q_1HW = triton_latent.store_and_absorb_row(q_HC, latent_W, turn, up_HDR, kv, group.slots_T, early=early)
        seen_1HR = triton_latent.decode(q_1HW, None, kv, group, plan, scale, early=early)
        out_HV = q_HC.new_empty((heads, both - plain))
        triton_latent.raise_row(seen_1HR, up_HDR, plain, out_HV, early=early)
        return out_HV

    def _latent_plan(self, metadata: AttnMetadata, group: GroupMetadata, heads: int) -> DecodePlan:
        """Return the shared data of a group of latents, made by its first layer."""
        plan, rows = group.extra.get("latents"), metadata.num_decodes
        tiles = triton_latent.tiles_of(heads, rows)
        if plan is None:
            multiprocessors = self._facts_of(metadata.lengths_B.device).multiprocessors
            given = group, metadata.lengths_B, rows, tiles, triton_latent.programs_of(rows, multiprocessors)
            plan = plan_decode(*given, joined_apart=triton_latent.MAX_PARTS)
            group.extra["latents"] = plan
        assert isinstance(plan, DecodePlan)
        assert plan.arrived_BK.shape[1] == tiles, "layers of one group have the same heads"
        return plan

    def _decode_plan(
        self, metadata: AttnMetadata, group: GroupMetadata, kv_heads: int, queries: tuple[int, int] | None = None
    ) -> DecodePlan:
        """Return the shared data of the group, made by its first layer unless `begin` made it.

        Args:
            queries: query heads and their size; None if the caller does not look for shared prefixes.
        """
        plan = group.extra.get("decode")
        if plan is None:
            programs = _PROGRAMS_PER_SM * self._facts_of(metadata.lengths_B.device).multiprocessors
            shared_B = None if queries is None or not can_share(queries[0], kv_heads, queries[1]) else group.shared_B
            plan = plan_decode(group, metadata.lengths_B, metadata.num_decodes, kv_heads, programs, shared_B)
            group.extra["decode"] = plan
        assert isinstance(plan, DecodePlan)
        assert plan.arrived_BK.shape[1] == kv_heads, "layers of one group have the same heads"
        return plan

    def _prefill_plan(self, metadata: AttnMetadata, group: GroupMetadata, q_THC: Tensor, kv_heads: int) -> PrefillPlan:
        plan = group.extra.get("prefill")
        if plan is None:
            known = self._facts_of(q_THC.device)
            # The kernel that uses the copy engine supports neither prefixes nor windows: see triton_prefill.
            captured = metadata.starts_B is not None
            plain = group.window is None and not any(metadata.starts[metadata.num_decodes :])
            fetch = "engine" if plain and known.copies_tiles else "threads"
            shape = shape_of(q_THC.shape[2], q_THC.element_size(), known.shared_bytes, fetch)
            make = make_tiles_on_device if captured else make_tiles
            tiles_L8 = make(metadata, q_THC.shape[1] // kv_heads, shape.rows, q_THC.shape[0])
            ahead = group.ahead
            ranges_2T = make_ranges(metadata, whole=ahead == "whole") if ahead in ("ranges", "whole") else None
            plan = PrefillPlan(tiles_L8, shape, ranges_2T)
            group.extra["prefill"] = plan
        assert isinstance(plan, PrefillPlan)
        return plan

    def _facts_of(self, device: torch.device) -> KernelFacts:
        known = self._facts.get(device)
        if known is None:
            known = self._facts[device] = platform_of(device).kernel_facts(device)
        return known


def _dense_heads(x_TKC: Tensor) -> Tensor:
    """Make a head's elements contiguous; the kernels take any strides over tokens and heads."""
    return x_TKC if x_TKC.stride(2) == 1 else x_TKC.contiguous()
