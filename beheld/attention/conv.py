"""Short causal convolutions on the paged cache.

A convolution over L positions looks as far back as attention with a window of L, so its inputs are stored in blocks as
keys are. Chunked prefill, shared prefixes, preemption and relaunched steps therefore need no extra code.

Shapes: T tokens of the step, B sequences, C channels, L positions that a token sees, its own last; N blocks of a table,
S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.context import current
from beheld.core.errors import ModelError
from beheld.platform import operators


@dataclass(eq=False)
class LayerInputs:
    """One layer's convolution inputs, (num_blocks, block_size, C); see LayerCache."""

    inputs: Tensor
    group: int

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks, the null block included."""
        return len(self.inputs)

    def clear(self, blocks: slice) -> None:
        """Zero these blocks."""
        self.inputs[blocks].zero_()


def convolve(module: Any, x_TC: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    """Convolve each channel of every sequence over this step and earlier positions; returns (T, C).

    `module` has its layer number: `layer_idx`, and for compiled code `layer_number`, the same as a tensor.
    """
    if torch.compiler.is_compiling():
        return torch.ops.beheld.convolve(x_TC, module.layer_number, weight_CL, bias_C)
    return _convolve_layer(module.layer_idx, x_TC, weight_CL, bias_C)


def _convolve_layer(layer: int, x_TC: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    context = current()
    cache = context.kv.get(layer)
    if not isinstance(cache, LayerInputs):
        raise ModelError(f"A convolution was called for layer {layer}, which has no convolution cache.")
    group = context.metadata.groups[cache.group]
    context.called[layer] = context.called.get(layer, 0) + 1
    length = weight_CL.shape[1]
    if group.window != length:
        raise ModelError(f"Layer {layer} convolves {length} positions, but its cache was made for {group.window}.")
    kept_SC = cache.inputs.view(-1, x_TC.shape[1])
    kept_SC.index_copy_(0, group.slots_T, x_TC.to(kept_SC.dtype))
    # Slot 0 represents positions before the first token; padding writes there.
    kept_SC[:1].zero_()
    found = group.extra.get("near")
    if found is None:
        found = group.extra["near"] = near_slots(context.metadata, group, length)
    out_TC = torch.einsum("tlc,cl->tc", kept_SC[found].to(weight_CL.dtype), weight_CL)
    # Contiguous as `_convolve_shape` promises, whatever the inputs' strides.
    return (out_TC if bias_C is None else out_TC + bias_C).to(x_TC.dtype).contiguous()


def near_slots(metadata: AttnMetadata, group: GroupMetadata, length: int) -> Tensor:
    """Return the slots (T, L) of each token and those before it, 0 for none, from tensors on the device.

    Token t of the batch belongs to the last sequence that starts at or before it.
    """
    bounds_B1 = metadata.cu_q_B1.long()
    token_T = torch.arange(group.slots_T.shape[0], device=bounds_B1.device)
    last = bounds_B1.shape[0] - 2
    sequence_T = (torch.searchsorted(bounds_B1, token_T, right=True) - 1).clamp(max=last)
    if metadata.starts_B is not None:
        starts_B = metadata.starts_B.long()
    else:
        starts_B = metadata.lengths_B.long() - bounds_B1.diff()
    position_T = starts_B[sequence_T] + token_T - bounds_B1[sequence_T]
    back_L = torch.arange(1 - length, 1, device=bounds_B1.device)
    position_TL = position_T.unsqueeze(1) + back_L
    index_TL = (position_TL.clamp(min=0) // metadata.block_size).clamp(max=group.tables_BN.shape[1] - 1)
    blocks_TL = group.tables_BN[sequence_T.unsqueeze(1), index_TL].long()
    slots_TL = blocks_TL * metadata.block_size + position_TL.clamp(min=0) % metadata.block_size
    return slots_TL.masked_fill(position_TL < 0, 0)


def _convolve(x_TC: Tensor, layer: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    return _convolve_layer(int(layer), x_TC, weight_CL, bias_C)


def _convolve_shape(x_TC: Tensor, layer: Tensor, weight_CL: Tensor, bias_C: Tensor | None) -> Tensor:
    """Describe the result for torch.compile."""
    return x_TC.new_empty(x_TC.shape)


operators.register(
    "convolve(Tensor x, Tensor layer, Tensor weight, Tensor? bias) -> Tensor", _convolve, _convolve_shape
)
