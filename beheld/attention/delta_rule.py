"""The gated delta rule of a layer, its convolution before it, as one registered operator.

torch.compile sees an opaque call, as of attention (op.py), so layers with the rule can be compiled. Backends with
kernels of their own compute it; else the parts of recurrent.py and gated_delta.py do.

Shapes: T tokens of the step, C channels of the convolution, L positions that it sees, H heads of values, V size of a
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from beheld.attention.backend import AttnMetadata, GroupMetadata
from beheld.attention.context import current
from beheld.attention.gated_delta import GatedDelta, Gates, decay_of
from beheld.attention.recurrent import LayerStates, StateSlice, layer_states, pieces_of, recur
from beheld.platform import operators


class DeltaKernels(Protocol):
    """A backend's kernels of the rule, convolution and SiLU included; `weights` are the convolution's and its bias."""

    def decode(
        self,
        x_TC: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        weights: tuple[Tensor, Tensor | None],
        cache: LayerStates,
        metadata: AttnMetadata,
        rule: GatedDelta,
        out_THV: Tensor,
        gates: Gates | None = None,
    ) -> None:
        """Compute the step's first tokens, one of each decoding sequence; writes their rows of `out_THV`.

        With `gates`, g and beta are a and b, of which these make them.
        """

    def prefill(
        self,
        x_TC: Tensor,
        g_TH: Tensor,
        beta_TH: Tensor,
        weights: tuple[Tensor, Tensor | None],
        cache: LayerStates,
        group: GroupMetadata,
        pieces: Sequence[StateSlice],
        rule: GatedDelta,
        out_THV: Tensor,
    ) -> None:
        """Compute the tokens of `pieces`; writes their rows of `out_THV`."""


def delta_rule(
    module: Any, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor, weight_CL: Tensor, bias_C: Tensor | None, rule: GatedDelta
) -> Tensor:
    """Convolve q, k and v of each token, apply SiLU and run the rule with what a step decays and writes; (T, H, V).

    Args:
        module: has its layer number, `layer_idx`, and for compiled code `layer_number`, the same as a tensor.

    Raises:
        ModelError: the layer has no states, or of another shape.
    """
    if torch.compiler.is_compiling():
        sizes = (rule.key_heads, rule.key_dim, rule.value_heads, rule.value_dim)
        return torch.ops.beheld.delta_rule(x_TC, g_TH, beta_TH, weight_CL, bias_C, module.layer_number, *sizes)
    return _delta_rule_layer(module.layer_idx, x_TC, g_TH, beta_TH, weight_CL, bias_C, rule)


def delta_row(
    layer: int,
    x_1C: Tensor,
    a_1H: Tensor,
    b_1H: Tensor,
    gates: Gates,
    convolution: tuple[Tensor, Tensor | None],
    rule: GatedDelta,
) -> Tensor:
    """As `delta_rule`, of the step's only token; its decay and its strength are made in the kernel. Returns (H, V).

    Args:
        convolution: weights (C, L), contiguous, and bias.

    Raises:
        ModelError: as `delta_rule`.
    """
    weight_CL, bias_C = convolution
    kernels: DeltaKernels | None = current().backend.delta
    if kernels is None:
        return _delta_rule_layer(layer, x_1C, decay_of(a_1H, *gates), b_1H.sigmoid(), weight_CL, bias_C, rule)[0]
    context, cache = layer_states(layer, weight_CL)
    out_1HV = x_1C.new_empty((1, rule.value_heads, rule.value_dim))
    kernels.decode(x_1C, a_1H, b_1H, convolution, cache, context.metadata, rule, out_1HV, gates)
    return out_1HV[0]


def _delta_rule_layer(
    layer: int, x_TC: Tensor, g_TH: Tensor, beta_TH: Tensor, weight_CL: Tensor, bias_C: Tensor | None, rule: GatedDelta
) -> Tensor:
    kernels: DeltaKernels | None = current().backend.delta
    if kernels is None:
        silu = nn.functional.silu
        return recur(layer, x_TC, weight_CL, bias_C, lambda y_TC: (silu(y_TC), g_TH, beta_TH), rule)
    context, cache = layer_states(layer, weight_CL)
    metadata = context.metadata
    group = metadata.groups[cache.group]
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    weight_CL = weight_CL.contiguous()
    out_THV = x_TC.new_empty((len(x_TC), rule.value_heads, rule.value_dim))
    if metadata.num_decodes:
        kernels.decode(x_TC, g_TH, beta_TH, (weight_CL, bias_C), cache, metadata, rule, out_THV)
    if pieces := pieces_of(metadata, group, cache.group):
        kernels.prefill(x_TC, g_TH, beta_TH, (weight_CL, bias_C), cache, group, pieces, rule, out_THV)
    return out_THV


def _delta_rule(
    x_TC: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    weight_CL: Tensor,
    bias_C: Tensor | None,
    layer: Tensor,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> Tensor:
    rule = GatedDelta(key_heads, key_dim, value_heads, value_dim)
    return _delta_rule_layer(int(layer), x_TC, g_TH, beta_TH, weight_CL, bias_C, rule).contiguous()


def _delta_rule_shape(
    x_TC: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    weight_CL: Tensor,
    bias_C: Tensor | None,
    layer: Tensor,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> Tensor:
    """Describe the result for torch.compile."""
    return x_TC.new_empty((x_TC.shape[0], value_heads, value_dim))


operators.register(
    "delta_rule(Tensor x, Tensor g, Tensor beta, Tensor weight, Tensor? bias, Tensor layer, int key_heads, int key_dim,"
    " int value_heads, int value_dim) -> Tensor",
    _delta_rule,
    _delta_rule_shape,
)
