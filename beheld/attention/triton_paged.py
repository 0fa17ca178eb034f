"""Attention on the paged cache in Triton kernels: the backend of NVIDIA GPUs.

One launch per layer if all sequences decode (it stores, attends and joins), and two more if some prefill: store, and
attend. Nothing is read back to the host. The decoding part reads every number that changes between steps from device
tensors, so that a CUDA graph may contain it: capture `begin` and the layers with tensors that stay in place (lengths_B,
tables_BN, slots_T) and change their contents between replays. Rows that pad such a graph have length 1 and slot 0: they
read nothing, write nothing to the cache, and their output is their new value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata, LayerKV
from beheld.attention.store import store
from beheld.attention.triton_decode import DecodePlan, decode, plan_decode
from beheld.attention.triton_prefill import PrefillPlan, make_sees, make_tiles, make_tiles_on_device, prefill, shape_of
from beheld.platform.platform import KernelFacts
from beheld.platform.registry import platform_of

# Programs of the decode kernel that run concurrently on one multiprocessor.
_PROGRAMS_PER_SM = 3


class TritonBackend:
    """See AttentionBackend; heads of 16 to 512 elements, any group size, block sizes that are powers of two."""

    name = "triton"
    captures_prefill = True
    stores_with_decodes = True

    def __init__(self) -> None:
        self._facts: dict[torch.device, KernelFacts] = {}

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
            plan = self._decode_plan(metadata, group, kv.keys.shape[2])
            early = self._facts_of(q_THC.device).early_launch
            decode(q_THC, k_TKC, v_TKC, out_THC, kv, group, plan, scale, softcap, sinks_H, early=early)
        if len(metadata.starts) > decodes:
            if decodes:
                store(k_TKC[decodes:], v_TKC[decodes:], kv, group.slots_T[decodes:])
            else:
                store(k_TKC, v_TKC, kv, group.slots_T)
            prefill_plan = self._prefill_plan(metadata, group, q_THC, kv.keys.shape[2])
            prefill(q_THC, k_TKC, v_TKC, out_THC, kv, group, prefill_plan, scale, softcap, sinks_H)
        return out_THC

    def store(self, k_TKC: Tensor, v_TKC: Tensor, kv: LayerKV, metadata: AttnMetadata) -> None:
        """See AttentionBackend."""
        store(_dense_heads(k_TKC), _dense_heads(v_TKC), kv, metadata.groups[kv.group].slots_T)

    def _decode_plan(self, metadata: AttnMetadata, group: GroupMetadata, kv_heads: int) -> DecodePlan:
        """Return the shared data of the group, made by its first layer unless `begin` made it."""
        plan = group.extra.get("decode")
        if plan is None:
            programs = _PROGRAMS_PER_SM * self._facts_of(metadata.lengths_B.device).multiprocessors
            plan = plan_decode(group, metadata.lengths_B, metadata.num_decodes, kv_heads, programs)
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
            plan = PrefillPlan(tiles_L8, shape, make_sees(metadata) if group.ahead == "ranges" else None)
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
