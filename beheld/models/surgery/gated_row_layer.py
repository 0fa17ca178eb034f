"""Decoder layers with gates for a single row, in launches each of which starts before the previous one ends.

A layer of the gated delta rule:

    norm | q, k, v, z, b, a | convolution | state | norm and gate | out + residual

and one of attention whose queries come with gates, head by head:

    norm | q and gates, k, v | rotation | attention | gate | o + residual

each with a gated MLP behind it. As in one_row_layer.py, a layer is taken apart by the names of its parts, and tried
next to the original.

Shapes: H hidden size, M heads of values, V size of a value, C channels of the convolution, L positions that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.delta_rule import delta_row
from beheld.attention.gated_delta import GatedDelta, Gates
from beheld.attention.op import attend_layer
from beheld.models.one_row import early_start
from beheld.models.surgery.joined import FirstOfFused
from beheld.models.surgery.latent_row_layer import GatedRow, gated_parts, normed_product, places_of
from beheld.models.surgery.one_row_layer import (
    Attend,
    Norm,
    Seen,
    SeenRecurrence,
    activation_of,
    added_to,
    agrees,
    attended,
    named_norms,
    norm_of,
    rotates,
    same_attention,
)
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.recurrent_trial import changed, delta_mixer, trial_states

# What a mixer takes of a row, in the order in which it is joined.
_MIXED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@dataclass(eq=False)
class DeltaRowLayer:
    """Computes a layer of the gated delta rule for one row.

    Attributes:
        before: the norm of the row.
        first: the joined product; `places` says where its outputs are.
        convolution: weights (C, L) and bias.
        gates, rule: of the states.
        norm: of each head of what was read, before it is gated.
        out: the product of all heads.
        mlp: what follows.
        layer: the layer's number.
    """

    before: Norm
    first: Any
    places: dict[str, slice]
    convolution: tuple[Tensor, Tensor | None]
    gates: Gates
    rule: GatedDelta
    norm: Norm
    out: Any
    mlp: GatedRow
    layer: int

    def __call__(self, hidden_states: Tensor, **unused: Any) -> Tensor:
        """Compute (1, 1, H) -> (1, 1, H); other arguments of transformers' model concern attention."""
        from beheld.models.gated_row_kernel import gated_norm

        x_H = hidden_states.reshape(-1)
        made = normed_product(self.first, self.before, x_H)
        x_C, z, b_M, a_M = (made[self.places[name]] for name in _MIXED)
        given = x_C.unsqueeze(0), a_M.unsqueeze(0), b_M.unsqueeze(0)
        read_MV = delta_row(self.layer, *given, self.gates, self.convolution, self.rule)
        early = early_start(x_H.device)
        gated = gated_norm(read_MV, z.view(read_MV.shape), self.norm.weight_H, self.norm.eps, early=early)
        return self.mlp(added_to(self.out, gated, x_H, None)).view(1, 1, -1)


@dataclass(eq=False)
class GatedAttentionRowLayer:
    """Computes a layer of attention with gates for one row.

    Attributes:
        before, first, mlp: as DeltaRowLayer's; the product's outputs are q and gates, k and v.
        heads, head_norms: as OneRowLayer's.
        o: the product of all heads.
        layer, window, scale, softcap: the layer's attention options.
    """

    before: Norm
    first: Any
    heads: tuple[int, int]
    head_norms: tuple[Tensor, float, bool] | None
    o: Any
    mlp: GatedRow
    layer: int
    window: int | None
    scale: float
    softcap: float | None
    attend: Attend = field(default=attend_layer)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **unused: Any
    ) -> Tensor:
        """Compute (1, 1, H) -> (1, 1, H); other arguments of transformers' model concern other attention."""
        from beheld.models.gated_row_kernel import sigmoid_gated
        from beheld.models.one_row_kernel import turn

        assert position_embeddings is not None, "a layer of this form rotates"
        early = early_start(hidden_states.device)
        x_H = hidden_states.reshape(-1)
        qkv = normed_product(self.first, self.before, x_H)
        q_heads, k_heads = self.heads
        cos_C, sin_C = (each.reshape(-1).contiguous() for each in position_embeddings)
        weights, from_one = None, False
        if self.head_norms is not None:
            weights, from_one = self.head_norms[:2], self.head_norms[2]
        turn(qkv, self.heads, cos_C, sin_C, weights, from_one=from_one, early=early, gated=True)
        heads_NC = qkv.view(2 * (q_heads + k_heads), -1)
        both_Q2C = heads_NC[: 2 * q_heads].unflatten(0, (q_heads, 2))
        q_1H1C = both_Q2C[:, 0].unsqueeze(1).unsqueeze(0)
        k_1K1C, v_1K1C = heads_NC[2 * q_heads :].unsqueeze(1).unsqueeze(0).split((k_heads, k_heads), dim=1)
        out = self.attend(self.layer, q_1H1C, k_1K1C, v_1K1C, self.window, self.scale, self.softcap)
        gated = sigmoid_gated(out.reshape(q_heads, -1).contiguous(), both_Q2C[:, 1], early=early)
        return self.mlp(added_to(self.o, gated, x_H, None)).view(1, 1, -1)


# ---------------------------------------------------------------------- detecting the form of a layer


def delta_form(layer: Any, trials: Sequence[Seen], trial: RankTrial) -> DeltaRowLayer | None:
    """Return a layer of the gated delta rule in this form; None if it has another form. See one_row_layer.py."""
    mixer = delta_mixer(layer)
    first = getattr(mixer, "in_proj_qkv", None)
    if mixer is None or not isinstance(first, FirstOfFused) or first.names != _MIXED:
        return None
    norm, out = getattr(mixer, "norm", None), getattr(mixer, "out_proj", None)
    if not isinstance(norm, nn.Module) or not isinstance(out, nn.Module):
        return None
    conv = mixer.conv1d
    convolution = conv.weight.data.squeeze(1).contiguous(), None if conv.bias is None else conv.bias.data
    gates = Gates(mixer.A_log.data, mixer.dt_bias.data)
    for from_one in (False, True):
        around = _around(layer, from_one)
        if around is None:
            return None
        before, mlp = around
        own = convolution, gates, mixer.recurrence, norm_of(norm, False), out, mlp, mixer.layer_idx
        made = DeltaRowLayer(before, first.product, places_of(first), *own)
        same = [_same_states(made, layer, each, trial) for each in trials]
        if trial.agreed(all(same)):
            return made
    return None


def gated_attention_form(layer: Any, trials: Sequence[Seen], trial: RankTrial) -> GatedAttentionRowLayer | None:
    """Return a layer of attention with gates in this form; None if it has another form."""
    if not attended(trials):
        return None
    seen, attention = trials[0], getattr(layer, "self_attn", None)
    first, o = getattr(attention, "q_proj", None), getattr(attention, "o_proj", None)
    joined = isinstance(first, FirstOfFused) and first.names == ("q_proj", "k_proj", "v_proj")
    if not joined or not isinstance(o, nn.Module) or not rotates(seen.keywords.get("position_embeddings"), seen):
        return None
    assert isinstance(first, FirstOfFused)
    heads = seen.query.shape[1], seen.key.shape[1]
    if first.sizes[0] != 2 * heads[0] * seen.query.shape[3]:
        return None
    own_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    for from_one in (False, True):
        around = _around(layer, from_one)
        if around is None:
            return None
        before, mlp = around
        head_norms = None
        if all(isinstance(each, nn.Module) for each in own_norms):
            both = [norm_of(each, from_one) for each in own_norms]
            head_norms = torch.stack([each.weight_H for each in both]), both[0].eps, from_one
        made = GatedAttentionRowLayer(before, first.product, heads, head_norms, o, mlp, *seen.asked)
        same = [same_attention(made, each, trial) for each in trials]
        if trial.agreed(all(same)):
            return made
    return None


def _around(layer: Any, from_one: bool) -> tuple[Norm, GatedRow] | None:
    """Return the first norm, and what follows attention or its like; None if they have another form."""
    names = named_norms(layer)
    gate_up, down = gated_parts(getattr(layer, "mlp", None))
    if names is None or names[1] is not None or names[3] is not None or not isinstance(down, nn.Module):
        return None
    tanh = None if gate_up is None else activation_of(layer.mlp)
    if tanh is None:
        return None
    before, before_mlp = (norm_of(getattr(layer, str(names[place])), from_one) for place in (0, 2))
    return before, GatedRow(before_mlp, gate_up, down, tanh)


def _same_states(made: DeltaRowLayer, layer: nn.Module, seen: Seen, trial: RankTrial) -> bool:
    """Return whether this form gives the states and the next layer the same values as the original."""
    from beheld.attention.triton_delta import TritonDelta

    assert isinstance(seen, SeenRecurrence)
    mixer, taken = delta_mixer(layer), list[tuple[Tensor, Tensor]]()

    def call(hidden: Tensor, **keywords: Any) -> Tensor:
        given = made(hidden, **keywords)
        taken.append(changed(mixer))
        return given

    with trial_states([layer], TritonDelta()):
        return agrees(call, seen, trial, taken, (seen.change, seen.inputs))
