"""A decoder layer of latent attention for a single row, in launches each of which starts before the previous one ends.

    norm, q_a, kv_a | norm, q_b | norm and rotations, absorbing | latents | joining | raising | o + residual

and then a gated MLP, or experts of which every row takes one (models/shared_expert_kernel.py):

    norm, router | choice | gate x up of the shared and the chosen experts | down + residual

transformers' layer, compiled, has some ten kernels more, between products that wait for them. As in one_row_layer.py, a
layer is taken apart by the names of its parts, and tried next to the original.

Shapes: H hidden size, elsewhere those of attention/latent.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from beheld.attention.latent import Growth, LatentTurn, LatentUp, turned
from beheld.attention.op import attend_latent_row
from beheld.models.one_row import OneRowLinear, early_start
from beheld.models.surgery.joined import FirstOfFused
from beheld.models.surgery.one_row_layer import (
    Norm,
    Seen,
    SeenAttention,
    activation_of,
    added_to,
    agrees,
    attended,
    named_norms,
    norm_of,
    probed_latents,
)
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.route_row import Rule, choice_of
from beheld.utils.log import get_logger

logger = get_logger(__name__)

AttendRow = Callable[[int, Tensor, Tensor, LatentTurn, Tensor, float], Tensor]
# Families' names of experts' routers.
_ROUTERS = ("gate", "router")
# Its kernels unroll the choices; with more, a layer does not have the form.
_MOST_CHOICES = 16


@dataclass(eq=False)
class GatedRow:
    """A norm, a gated MLP, and the residual.

    Attributes:
        tanh: GELU in its tanh approximation; otherwise SiLU.
    """

    norm: Norm
    gate_up: Any
    down: Any
    tanh: bool

    def __call__(self, x_H: Tensor) -> Tensor:
        """Compute (H,) -> (H,)."""
        from beheld.models.one_row_kernel import gate

        inner = normed_product(self.gate_up, self.norm, x_H)
        return added_to(self.down, gate(inner, tanh=self.tanh, early=early_start(x_H.device)), x_H, None)


@dataclass(eq=False)
class SharedExpertRow:
    """A norm, a router's experts and one that every row takes, and the residual.

    Attributes:
        router, rule: with route_row.py's parts, and how it chooses.
        experts: with the weights of transformers' gated experts.
        gate_up, down: of the shared expert.
        tanh: as GatedRow's.
    """

    norm: Norm
    router: Any
    rule: Rule
    experts: Any
    gate_up: OneRowLinear
    down: OneRowLinear
    tanh: bool

    def __call__(self, x_H: Tensor) -> Tensor:
        """Compute (H,) -> (H,)."""
        from beheld.models.normed_row_kernel import MOST_INPUTS, normed_row
        from beheld.models.one_row_kernel import one_row
        from beheld.models.shared_expert_kernel import inner, outer

        early, router, rule = early_start(x_H.device), self.router, self.rule
        dtype = torch.float32 if rule.wide_logits else x_H.dtype
        bias_E, correction_E = getattr(router, "bias", None), getattr(router, "e_score_correction_bias", None)
        if x_H.numel() <= MOST_INPUTS:
            normed_H = torch.empty_like(x_H)
            given = x_H, self.norm.weight_H, self.norm.eps, router.weight, bias_E
            how: dict[str, Any] = {"from_one": self.norm.from_one, "early": early, "dtype": dtype}
            logits_E = normed_row(*given, normed_K=normed_H, **how)
        else:
            normed_H = self.norm(x_H)
            logits_E = one_row(normed_H, router.weight, bias_E, early=early, dtype=dtype)
        shares = torch.float32 if rule.wide_shares else x_H.dtype
        share_C, choice_C = choice_of(logits_E, correction_E, rule, shares)
        up, down = self.experts.gate_up_proj, self.experts.down_proj
        gated = inner(normed_H, up, self.gate_up.weight, choice_C, tanh=self.tanh, early=early)
        return outer(gated, down, self.down.weight, choice_C, share_C, x_H, early=early)


@dataclass(eq=False)
class LatentRowLayer:
    """Computes the layer for one row.

    Attributes:
        first: the product of the row; `query` and `latent` say where the outputs of q (or q_a) and of kv_a are.
        before, latent_norm: the norms of the row and of the latent.
        second: the norm and the product that make queries of q_a's outputs; None if there is no q_a.
        interleaved: see LatentTurn.
        growth: beta and span, if queries grow with positions; see Growth.
        mlp: what follows attention.
        layer, scale: the layer's attention options.
    """

    first: Any
    query: slice
    latent: slice
    before: Norm
    second: tuple[Norm, Any] | None
    latent_norm: Norm
    up: LatentUp
    interleaved: bool
    growth: tuple[float, float] | None
    o: Any
    mlp: GatedRow | SharedExpertRow
    layer: int
    scale: float
    attend: AttendRow = field(default=attend_latent_row)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        position_ids: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Compute (1, 1, H) -> (1, 1, H); other arguments of transformers' model concern other attention."""
        assert position_embeddings is not None, "a layer of this form rotates"
        growth = None
        if self.growth is not None:
            assert position_ids is not None, "its queries grow with positions"
            growth = Growth(position_ids.reshape(-1), *self.growth)
        x_H = hidden_states.reshape(-1)
        made = normed_product(self.first, self.before, x_H)
        q = made[self.query]
        if self.second is not None:
            norm, product = self.second
            q = normed_product(product, norm, q)
        cos_P, sin_P = (each.reshape(-1).contiguous() for each in position_embeddings)
        turn = LatentTurn(self.latent_norm.weight_H, self.latent_norm.eps, cos_P, sin_P, self.interleaved, growth)
        q_HC = q.view(self.up.heads, -1)
        out_HV = self.attend(self.layer, q_HC, made[self.latent], turn, self.up.up_HDR, self.scale)
        return self.mlp(added_to(self.o, out_HV.reshape(-1), x_H, None)).view(1, 1, -1)


def normed_product(product: Any, norm: Norm, x_K: Tensor) -> Tensor:
    """Return the product of the normalized row, (N,), contiguous; in one launch if it is small."""
    from beheld.models.normed_row_kernel import is_small, normed_row

    if type(product) is OneRowLinear and product.weight.is_contiguous() and is_small(product.weight):
        bias_N = None if product.bias is None else product.bias.contiguous()
        given = x_K, norm.weight_H, norm.eps, product.weight, bias_N
        return normed_row(*given, from_one=norm.from_one, early=early_start(x_K.device))
    made: Tensor = product(norm(x_K)).contiguous()
    return made


# ---------------------------------------------------------------------- detecting the form of a layer


def latent_form(layer: Any, trials: Sequence[Seen], trial: RankTrial) -> LatentRowLayer | None:
    """Return the layer in this form; None if it has another form. See one_row_layer.py."""
    if not attended(trials):
        return None
    attention, seen = getattr(layer, "self_attn", None), trials[0]
    up = getattr(attention, "kv_b_proj", None)
    names = named_norms(layer)
    cos_sin: Any = seen.keywords.get("position_embeddings")
    if not isinstance(up, LatentUp) or names is None or names[1] is not None or names[3] is not None:
        return None
    if not _rotates(cos_sin, seen, up):
        return None
    before, before_mlp = (norm_of(getattr(layer, str(names[place])), False) for place in (0, 2))
    first, second = _products(attention)
    latent_norm, mlp = getattr(attention, "kv_a_layernorm", None), _mlp(getattr(layer, "mlp", None), before_mlp)
    o = getattr(attention, "o_proj", None)
    if first is None or mlp is None or not isinstance(latent_norm, nn.Module) or not isinstance(o, nn.Module):
        return None
    number, window, scale, softcap = seen.asked
    if window is not None or softcap is not None:
        return None
    places = places_of(first)
    latent = places.pop("kv_a_proj_with_mqa")
    (query,) = places.values()
    for interleaved in (True, False):
        own = before, second, norm_of(latent_norm, False), up, interleaved, _growth(attention), o, mlp, number, scale
        made = LatentRowLayer(first.product, query, latent, *own)
        same = [_same(made, each, trial) for each in trials]
        if trial.agreed(all(same)):
            return made
    return None


def _growth(attention: Any) -> tuple[float, float] | None:
    """Return beta and the span by which queries grow, as configurations say; a trial beyond the span may disagree."""
    rope = getattr(getattr(attention, "config", None), "rope_parameters", None) or {}
    beta, span = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    return (float(beta), float(span)) if beta and span else None


def _rotates(cos_sin: Any, seen: SeenAttention, up: LatentUp) -> bool:
    """Return whether keys and queries end in numbers that one row of cosines and sines in their type rotates."""
    if not isinstance(cos_sin, tuple) or len(cos_sin) != 2:
        return False
    rotary = seen.key.shape[-1] - up.weight.shape[1]
    return all(
        isinstance(each, Tensor) and each.dtype == seen.query.dtype and each.numel() == each.shape[-1] == rotary
        for each in cos_sin
    )


def _products(attention: Any) -> tuple[FirstOfFused | None, tuple[Norm, Any] | None]:
    """Return the joined product of the row, and the norm and the product of q_a's outputs if there is a q_a."""
    joined = [getattr(attention, name, None) for name in ("q_a_proj", "q_proj", "kv_a_proj_with_mqa")]
    first = next((each for each in joined if isinstance(each, FirstOfFused)), None)
    if first is None or len(first.names) != 2 or "kv_a_proj_with_mqa" not in first.names:
        return None, None
    if "q_a_proj" not in first.names:
        return first, None
    norm, product = getattr(attention, "q_a_layernorm", None), getattr(attention, "q_b_proj", None)
    if not isinstance(norm, nn.Module) or not isinstance(product, nn.Module):
        return None, None
    return first, (norm_of(norm, False), product)


def places_of(first: FirstOfFused) -> dict[str, slice]:
    """Return where each joined layer's outputs are."""
    places, start = {}, 0
    for name, size in zip(first.names, first.sizes, strict=True):
        places[name] = slice(start, start + size)
        start += size
    return places


def _mlp(mlp: Any, norm: Norm) -> GatedRow | SharedExpertRow | None:
    """Return what follows attention in a form of ours; None if it has another one."""
    experts = getattr(mlp, "experts", None)
    if experts is None:
        gate_up, down = gated_parts(mlp)
        tanh = None if gate_up is None else activation_of(mlp)
        return None if tanh is None or not isinstance(down, nn.Module) else GatedRow(norm, gate_up, down, tanh)
    router = next((found for name in _ROUTERS if (found := getattr(mlp, name, None)) is not None), None)
    gate_up, down = gated_parts(getattr(mlp, "shared_experts", None))
    tanh = activation_of(experts)
    # Both are attributes of a router, and of experts, whose trials said that the kernels of a row give what they gave.
    if router is None or "row_rule" not in vars(router) or "forward" not in vars(experts) or tanh is None:
        return None
    if not _gate_is_an_activation(experts, tanh):
        return None
    weights = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if getattr(experts, "has_bias", True) or any(not isinstance(each, Tensor) or each.dim() != 3 for each in weights):
        return None
    for own in (gate_up, down):
        if type(own) is not OneRowLinear or own.bias is not None or not own.weight.is_contiguous():
            return None
    assert isinstance(gate_up, OneRowLinear)
    assert isinstance(down, OneRowLinear)
    rule = Rule(*router.row_rule)
    if rule.choices > _MOST_CHOICES or not router.weight.is_contiguous():
        return None
    return SharedExpertRow(norm, router, rule, experts, gate_up, down, tanh)


def _gate_is_an_activation(experts: Any, tanh: bool) -> bool:
    """Return whether experts' gate multiplies an activation alone, of large numbers too: a limit would not be seen in
    a trial of normalized rows."""
    both = torch.linspace(-100, 100, 512).view(2, 256)
    gate, up = both.chunk(2, dim=-1)
    activated = nn.functional.gelu(gate, approximate="tanh") if tanh else nn.functional.silu(gate)
    return torch.allclose(experts._apply_gate(both), activated * up, rtol=1e-4, atol=1e-3)


def gated_parts(mlp: Any) -> tuple[nn.Module | None, Any]:
    """Return the joined product and the last one of a gated MLP."""
    joined = getattr(mlp, "gate_proj", None)
    if not isinstance(joined, FirstOfFused) or joined.names != ("gate_proj", "up_proj"):
        return None, None
    return joined.product, getattr(mlp, "down_proj", None)


def _same(made: LatentRowLayer, seen: SeenAttention, trial: RankTrial) -> bool:
    """Return whether this form gives attention and the next layer the same values as the original."""
    taken: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q_HC: Tensor, latent_W: Tensor, turn: LatentTurn, up_HDR: Tensor, scale: float) -> Tensor:
        q_1HC, latent_1W = turned(q_HC.unsqueeze(0), latent_W.unsqueeze(0), turn)
        taken.append((q_1HC.transpose(0, 1).unsqueeze(0), latent_1W[None, None]))
        return probed_latents(*taken[0], made.up, scale)[0, 0]

    made.attend = attend
    try:
        return agrees(made, seen, trial, taken, (seen.query, seen.key))
    finally:
        made.attend = attend_latent_row
