"""A decoder layer for a single row as nine launches, each of which starts before the previous one ends.

    norm | q, k, v | rotation | attention | o + residual | norm | gate, up | gate x up | down + residual

transformers' layer, compiled, has the same operations, but the compiler's kernels let their successors start late or
not at all, so that products wait instead of reading their weights. Whether a layer has this form does not depend on its
class: the layer is taken apart by the names of its parts, run next to the original on a random row at two positions,
and left unchanged unless both give the same results.

Shapes: H hidden size, C head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from beheld.attention.latent import LatentUp, expanded
from beheld.attention.op import attend_layer
from beheld.core.errors import EngineDeadError, first_line
from beheld.models.one_row import AddingLinear, early_start
from beheld.models.surgery.rank_trial import RankTrial
from beheld.models.surgery.recurrent_trial import changed, delta_mixer, trial_states
from beheld.utils.log import get_logger

logger = get_logger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor, int | None, float, float | None], Tensor]

# Families' names of the norms before attention, after it (before the residual), before the MLP, and after it.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(eq=False)
class Norm:
    """An RMS norm: its weights, and whether they are offsets from one."""

    weight_H: Tensor
    eps: float
    from_one: bool

    def __call__(self, x_H: Tensor, residual_H: Tensor | None = None) -> Tensor:
        """Normalize (H,) -> (H,), added to `residual_H` if given."""
        from beheld.models.one_row_kernel import norm

        early = early_start(x_H.device)
        return norm(x_H, self.weight_H, self.eps, from_one=self.from_one, early=early, residual_H=residual_H)


@dataclass(eq=False)
class OneRowLayer:
    """Computes the layer for one row.

    Attributes:
        norms: before attention, after it, before the MLP, after it.
        qkv, o, gate_up, down: its products, of any kind that accepts one row.
        heads: the numbers of heads of q and of k.
        turned: the rotated elements of a head.
        head_norms: weights (2, C) of q and k, epsilon, and whether weights are offsets from one.
        tanh: GELU in its tanh approximation; otherwise SiLU.
        layer, window, scale, softcap: the layer's attention options.
    """

    norms: tuple[Norm, Norm | None, Norm, Norm | None]
    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    heads: tuple[int, int]
    turned: int
    head_norms: tuple[Tensor, float, bool] | None
    tanh: bool
    layer: int
    window: int | None
    scale: float
    softcap: float | None
    attend: Attend = field(default=attend_layer)

    def computes(self) -> bool:
        """Return whether the layer can be computed in this form, before it is tried."""
        return True

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **unused: Any
    ) -> Tensor:
        """Compute (1, 1, H) -> (1, 1, H); other arguments of transformers' model concern other attention."""
        from beheld.models.one_row_kernel import gate, turn

        assert position_embeddings is not None, "a layer of this form rotates"
        before, after, before_mlp, after_mlp = self.norms
        early = early_start(hidden_states.device)
        x_H = hidden_states.reshape(-1)
        qkv = self.qkv(before(x_H)).contiguous()
        q_heads, k_heads = self.heads
        cos_C, sin_C = (each.reshape(-1).contiguous() for each in position_embeddings)
        weights, from_one = None, False
        if self.head_norms is not None:
            weights, from_one = self.head_norms[:2], self.head_norms[2]
        turn(qkv, self.heads, cos_C, sin_C, weights, from_one=from_one, early=early)
        heads_1N1C = qkv.view(1, q_heads + 2 * k_heads, 1, -1)
        q_1H1C, k_1K1C, v_1K1C = heads_1N1C.split((q_heads, k_heads, k_heads), dim=1)
        out = self.attend(self.layer, q_1H1C, k_1K1C, v_1K1C, self.window, self.scale, self.softcap)
        x_H = added_to(self.o, out.reshape(-1), x_H, after)
        inner = gate(self.gate_up(before_mlp(x_H)).contiguous(), tanh=self.tanh, early=early)
        return added_to(self.down, inner, x_H, after_mlp).view(1, 1, -1)


def added_to(product: nn.Module, x: Tensor, residual_H: Tensor, norm: Norm | None) -> Tensor:
    """Return residual + product(x), the product normalized if there is a norm."""
    if norm is not None:
        return norm(product(x).contiguous(), residual_H)
    if isinstance(product, AddingLinear):
        return product.added(x, residual_H)
    made: Tensor = residual_H + product(x)
    return made


@torch.no_grad()
def one_row_norm(norm: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the equivalent of this norm for one row; None if it is not an RMS norm."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or _eps(norm) is None:
        return None
    hidden = torch.randn(weight.numel(), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    wanted = norm(hidden)
    for from_one in (False, True):
        made = norm_of(norm, from_one)
        if near(made(hidden), wanted, wanted.float()):
            return functools.partial(_as_rows, made)
    return None


def _as_rows(norm: Norm, hidden_states: Tensor) -> Tensor:
    """(1, 1, H) -> (1, 1, H)."""
    return norm(hidden_states.reshape(-1)).view(hidden_states.shape)


# ---------------------------------------------------------------------- detecting the form of a layer


LayerT = TypeVar("LayerT", bound=OneRowLayer)
# Tries one form: of a layer, what was seen of it, and what ranks agree by; returns None if the layer has another form.
Form = Callable[[Any, Sequence["Seen"], RankTrial], Callable[..., Tensor] | None]


@dataclass(eq=False)
class Seen:
    """What the original layer did with a random row: its arguments and its output."""

    hidden: Tensor
    keywords: Mapping[str, Any]
    given: Tensor


@dataclass(eq=False)
class SeenAttention(Seen):
    """And its attention call."""

    query: Tensor
    key: Tensor
    value: Tensor
    asked: tuple[int, int | None, float, float | None]


@dataclass(eq=False)
class SeenRecurrence(Seen):
    """And what it changed; see recurrent_trial.py."""

    change: Tensor
    inputs: Tensor


def attended(trials: Sequence[Seen]) -> TypeGuard[Sequence[SeenAttention]]:
    """Return whether the layer called attention in all trials."""
    return all(isinstance(each, SeenAttention) for each in trials)


# How much two ways to compute a layer's contribution may differ, relative to its norm, and how much its output may, a
# rounding.
_OFF, _ROUNDINGS = 0.03, 0.5
_PROBE = "beheld_probe"
# Positions of the trial: near the start, and at the end of the context or beyond this many original contexts, less room
# for the position's further axes.
_NEAR, _TIMES, _AXES = 3, 4, 8
# Keywords that transformers' layers pass to attention and that change nothing for one row. What depends on the position
# in the layer itself shows at the second position of the trial.
_FREE = frozenset({"dropout", "position_ids", "use_cache", "past_key_values", "cache_position", "is_causal"})


def one_row_layers(text: Any, kind: Callable[..., LayerT], trial: RankTrial | None = None) -> dict[nn.Module, LayerT]:
    """Return the text model's layers that have this form, tried one by one; none if the trial itself fails.

    Args:
        trial: as `layers_of_forms`.

    Raises:
        EngineDeadError: as `layers_of_forms`.
    """
    found: dict[nn.Module, Any] = layers_of_forms(text, [usual_form(kind)], trial)
    return found


def usual_form(kind: Callable[..., LayerT]) -> Form:
    """Return what finds layers of OneRowLayer's form."""
    return functools.partial(_form, kind)


@torch.no_grad()
def layers_of_forms(
    text: Any, forms: Sequence[Form], trial: RankTrial | None = None, *, states: bool = False
) -> dict[nn.Module, Callable[..., Tensor]]:
    """Return the text model's layers that have one of these forms, tried one by one; none if the trial itself fails.

    Args:
        trial: where ranks that share the layers agree; None if there is only this one.
        states: give layers of the gated delta rule states; without, a model that has one gets no form.

    Raises:
        EngineDeadError: the trial failed on this rank alone, and others wait for it.
    """
    trial = trial or RankTrial(None)
    try:
        # The near one last: some rotations keep the frequencies of the longest sequence until a short one comes.
        far, near = (_watched(text, first, states=states) for first in (_far(text.config), _NEAR))
    except Exception as error:
        # The layers of some families need more than one row; they stay unchanged.
        logger.debug("No layer gets a single-row form: %s", first_line(error))
        trial.failed(error)
        return {}
    found: dict[nn.Module, Callable[..., Tensor]] = {}
    for layer, original in near.items():
        for form in forms if layer in far else ():
            made = form(layer, (original, far[layer]), trial)
            if made is not None:
                found[layer] = made
                break
    return found


def _form(kind: Callable[..., LayerT], layer: Any, trials: Sequence[Seen], trial: RankTrial) -> LayerT | None:
    """Return the layer in this form; None if it has another form."""
    if not attended(trials):
        return None
    seen = trials[0]
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    cos_sin: Any = seen.keywords.get("position_embeddings")
    names = named_norms(layer)
    if attention is None or mlp is None or names is None or not rotates(cos_sin, seen):
        return None
    products: tuple[Any, Any, Any, Any] = (
        _joined(attention, "q_proj", "qkv_proj"),
        getattr(attention, "o_proj", None),
        _joined(mlp, "gate_proj", "gate_up_proj"),
        getattr(mlp, "down_proj", None),
    )
    if any(not isinstance(each, nn.Module) for each in products):
        return None
    tanh = activation_of(mlp)
    if tanh is None:
        return None
    number, window, scale, softcap = seen.asked
    heads = seen.query.shape[1], seen.key.shape[1]
    own = [getattr(attention, name, None) for name in _HEAD_NORMS]
    for from_one in (False, True):
        norms: Any = tuple(None if name is None else norm_of(getattr(layer, name), from_one) for name in names)
        head_norms = None
        if all(isinstance(each, nn.Module) for each in own):
            both = [norm_of(each, from_one) for each in own]
            head_norms = torch.stack([each.weight_H for each in both]), both[0].eps, from_one
        made = kind(norms, *products, heads, cos_sin[0].numel(), head_norms, tanh, number, window, scale, softcap)
        # Ranks wait for each other in every trial, also after one that failed here.
        if not trial.agreed(made.computes()):
            continue
        same = [same_attention(made, each, trial) for each in trials]
        if trial.agreed(all(same)):
            return made
    return None


def activation_of(mlp: Any) -> bool | None:
    """Return False for SiLU and True for GELU in its tanh approximation, judged by results; None for others."""
    act = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    x = torch.linspace(-8, 8, 257)
    made = act(x) if callable(act) else None
    for tanh, wanted in ((False, nn.functional.silu(x)), (True, nn.functional.gelu(x, approximate="tanh"))):
        if made is not None and torch.allclose(made, wanted, rtol=0.0, atol=1e-5):
            return tanh
    return None


def named_norms(layer: nn.Module) -> tuple[str | None, ...] | None:
    """Return the layer's norms by place; None if it has others."""
    own = {name for name, child in layer.named_children() if hasattr(child, "weight") and not list(child.children())}
    known = next((names for names in _NORMS if {name for name in names if name is not None} == own), None)
    eps = [_eps(getattr(layer, name)) for name in known or () if name is not None]
    return None if any(each is None for each in eps) else known


def _eps(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def norm_of(norm: Any, from_one: bool) -> Norm:
    """Return an RMS norm for one row; see Norm."""
    return Norm(norm.weight.data, _eps(norm) or 0.0, from_one)


def _joined(module: nn.Module, first: str, whole: str) -> Any:
    """Return the product of all layers with this input, as fuse_linears joined them or as the family has it."""
    found = getattr(module, first, None)
    return getattr(module, whole, None) if found is None else getattr(found, "product", None)


def rotates(cos_sin: Any, seen: SeenAttention) -> bool:
    """Return whether heads are rotated by one row of cosines and sines in their type."""
    if not isinstance(cos_sin, tuple) or len(cos_sin) != 2:
        return False
    size = seen.query.shape[-1]
    fits = seen.key.shape[-1] == seen.value.shape[-1] == size
    return fits and all(
        isinstance(each, Tensor) and each.dtype == seen.query.dtype and each.numel() == each.shape[-1] <= size
        for each in cos_sin
    )


def same_attention(made: Any, seen: SeenAttention, trial: RankTrial) -> bool:
    """Return whether a form gives attention and the next layer the same values as the original.

    Args:
        made: the form, whose `attend` stands for attention.
    """
    taken: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: Any, scale: float, softcap: Any) -> Tensor:
        taken.append((q.clone(), k.clone(), v.clone()))
        return probed(q, k, v, scale)

    made.attend = attend
    try:
        return agrees(made, seen, trial, taken, (seen.query, seen.key, seen.value))
    finally:
        made.attend = attend_layer


def agrees(
    made: Callable[..., Tensor],
    seen: Seen,
    trial: RankTrial,
    taken: Sequence[tuple[Tensor, ...]],
    wanted: tuple[Tensor, ...],
) -> bool:
    """Return whether a form gives the next layer what the original gave, and attention these values.

    Args:
        taken: gets what the form gives attention, when it is called.

    Raises:
        EngineDeadError: the trial failed on this rank alone, and others wait for it.
    """
    try:
        given = made(seen.hidden, **seen.keywords)
    except EngineDeadError:
        raise
    except Exception as error:  # Triton's errors have no class in common with others.
        logger.debug("A layer does not have the single-row form: %s", first_line(error))
        trial.failed(error)
        return False
    for found, its in zip(taken[0], wanted, strict=True):
        if found.shape != its.shape or not near(found, its, its.float()):
            return False
    return near(given, seen.given, seen.given.float() - seen.hidden.float())


def near(found: Tensor, wanted: Tensor, added: Tensor) -> bool:
    """Return whether both are equal but for roundings, relative to what the layer added."""
    eps = torch.finfo(wanted.dtype).eps
    bound = _OFF * added.norm() + _ROUNDINGS * eps * wanted.float().norm()
    return bool((found.float() - wanted.float()).norm() <= bound)


def probed_latents(q_1HTC: Tensor, latent_11TW: Tensor, up: LatentUp, scale: float) -> Tensor:
    """Return `probed` of the keys and values that latents become; (1, T, H, V)."""
    rotary = latent_11TW.shape[3] - up.weight.shape[1]
    both = expanded(latent_11TW[0, 0], up.up_HDR, q_1HTC.shape[3] - rotary)
    k_1HTC, v_1HTV = (each.transpose(0, 1).unsqueeze(0) for each in both)
    return probed(q_1HTC, k_1HTC, v_1HTV, scale)


def probed(q_1HTC: Tensor, k_1KTC: Tensor, v_1KTC: Tensor, scale: float) -> Tensor:
    """Return (1, T, H, C) that depends on q, k and v, in attention's place: attention of a single row is v alone."""
    group = q_1HTC.shape[1] // k_1KTC.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k_1KTC, v_1KTC))
    weight = torch.sigmoid((q_1HTC.float() * k.float()).sum(-1, keepdim=True) * scale)
    return (v.float() * weight).to(v.dtype).transpose(1, 2)


def _watched(text: Any, first: int, *, states: bool = False) -> dict[nn.Module, Seen]:
    """Run a text model on one random row at the position `first`, and record what each layer did."""
    arguments: dict[nn.Module, tuple[Tensor, dict[str, Any]]] = {}
    asked: list[tuple[Tensor, Tensor, Tensor, tuple[int, int | None, float, float | None]]] = []
    seen: dict[nn.Module, Seen] = {}

    def enters(layer: nn.Module, given: Sequence[Any], keywords: dict[str, Any]) -> None:
        asked.clear()
        arguments[layer] = (given[0] if given else keywords["hidden_states"]), keywords

    def leaves(layer: nn.Module, given: Sequence[Any], output: Any) -> None:
        hidden, keywords = arguments[layer]
        more = {name: value for name, value in keywords.items() if name != "hidden_states"}
        plain = len(given) <= 1 and isinstance(output, Tensor) and output.shape == hidden.shape
        mixer = delta_mixer(layer)
        if plain and len(asked) == 1 and mixer is None:
            seen[layer] = SeenAttention(hidden, more, output, *asked[0])
        if plain and not asked and mixer is not None:
            seen[layer] = SeenRecurrence(hidden, more, output, *changed(mixer))

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
        sliding_window: int | None = None, softcap: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        number = getattr(module, "layer_idx", None)
        unknown = [name for name, value in options.items() if value is not None and name not in _FREE]
        if mask is None and number is not None and not unknown:
            asked.append((query.clone(), key.clone(), value.clone(), (number, sliding_window, scale, softcap)))
        up = getattr(module, "kv_b_proj", None)
        if isinstance(up, LatentUp):
            return probed_latents(query, key, up, scale), None
        return probed(query, key, value, scale), None

    handles = [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in text.layers]
    handles += [layer.register_forward_hook(leaves) for layer in text.layers]
    try:
        with _attention_by(text.config, attention), trial_states(text.layers if states else (), None):
            _run_one_row(text, first)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _far(config: Any) -> int:
    """Return a position beyond those of short texts: some families scale queries from the original context on."""
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    originals = [rope.get("original_max_position_embeddings") or 0 for rope in each]
    most = getattr(config, "max_position_embeddings", None) or 0
    return int(max(most - _AXES, _TIMES * max(originals), _NEAR))


def _run_one_row(text: Any, first: int) -> None:
    weight = next(text.layers.parameters())
    axes = max((len(section) for module in text.modules()
                if isinstance(section := getattr(module, "mrope_section", None), list | tuple)), default=1)  # fmt: skip
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 1, text.config.hidden_size, generator=chance).to(weight.device, weight.dtype)
    # A different position per axis, none of them zero, because zero rotates nothing.
    positions = torch.arange(first, first + 2 * axes, 2, device=weight.device).view(axes, 1, 1)
    text(inputs_embeds=hidden, position_ids=positions if axes > 1 else positions[0], use_cache=False)


@contextmanager
def _attention_by(config: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """Within the block, replace the attention of layers with this configuration by a function of ours."""
    from transformers import AttentionInterface

    before = config._attn_implementation
    AttentionInterface.register(_PROBE, attention)
    config._attn_implementation = {"": _PROBE}
    try:
        yield
    finally:
        config._attn_implementation = {"": before}
        # A stateless function: the name stays registered.
        AttentionInterface.register(_PROBE, probed)
