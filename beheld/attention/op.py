"""Attention as one registered operator, so that torch.compile sees an opaque call.

Everything that differs between layers of one shape is passed as a tensor, the layer's number too (`number_layers`), so
one compiled layer serves all of them. A Python integer would be compiled in, and each layer would be compiled
separately.

Shapes: T tokens, H query heads, K key-value heads, C head size, D value size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from beheld.attention import cpu_decode
from beheld.attention.backend import Further, LayerKV, LayerLatent
from beheld.attention.context import CrossContext, current
from beheld.attention.cross import read_states
from beheld.attention.latent import LatentTurn, turned
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ModelError
from beheld.platform import operators


def attend_layer(
    layer: int,
    q_1HTC: Tensor,
    k_1KTC: Tensor,
    v_1KTD: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None = None,
    bias_HD: Tensor | None = None,
    further: Further | None = None,
) -> Tensor:
    """Attend in one layer with the current pass's backend, cache and metadata; returns (1, T, H, D).

    `bias_HD` and `further` are TorchBackend.attend's, for families with `plain_attention`.

    Raises:
        ModelError: the text model has no such layer, or its cache was made for another window or shape.
    """
    context = current()
    kv = context.kv.get(layer)
    if not isinstance(kv, LayerKV):
        raise ModelError(f"Attention was called for layer {layer}, which has no keys and values in the text model.")
    group = context.metadata.groups[kv.group]
    known = group.window if group.chunk is None else None
    if window != known:
        raise ModelError(f"Layer {layer} has the window {window}, but its cache was made for {known}.")
    given, made = (k_1KTC.shape[1], k_1KTC.shape[3], v_1KTD.shape[3]), (*kv.keys.shape[2:], kv.values.shape[3])
    if given != made:
        raise ModelError(f"Layer {layer} gives {_shape_of(given)}, but its cache was made for {_shape_of(made)}.")
    metadata, tail = context.metadata, context.tail
    if tail is not None and layer >= tail.first_layer:
        if tail.storing:
            context.backend.store(k_1KTC[0].transpose(0, 1), v_1KTD[0].transpose(0, 1), kv, metadata)
            tail.stored = True
            # The output is unused: the attention is run only to store keys and values.
            return q_1HTC.new_zeros((1, q_1HTC.shape[2], q_1HTC.shape[1], v_1KTD.shape[3]))
        metadata = tail.metadata
    context.called[layer] = context.called.get(layer, 0) + 1
    q_THC, k_TKC, v_TKD = (each[0].transpose(0, 1) for each in (q_1HTC, k_1KTC, v_1KTD))
    backend = context.backend
    if bias_HD is None and further is None:
        return backend.attend(q_THC, k_TKC, v_TKD, kv, metadata, scale, softcap, sinks_H).unsqueeze(0)
    assert isinstance(backend, TorchBackend), "the family does not say plain_attention"
    return backend.attend(
        q_THC, k_TKC, v_TKD, kv, metadata, scale, softcap, sinks_H, bias_HD, further
    ).unsqueeze(0)  # fmt: skip


def decodes_alone(layer: int, q_BHC: Tensor, window: int | None, job: Any) -> bool:
    """Let a job of cpu_decode's `steps` compute this layer, if the current pass is of decoding sequences alone.

    Args:
        q_BHC: memory as the queries'.

    Returns:
        Whether the job computes the layer, which then counts as called; otherwise `attend_layer` does.
    """
    context = current()
    kv, metadata, backend = context.kv.get(layer), context.metadata, context.backend
    rows = q_BHC.shape[0]
    if type(backend) is not TorchBackend or type(kv) is not LayerKV or context.tail is not None:
        return False
    if metadata.stored or not metadata.num_decodes == len(metadata.starts) == rows:
        return False
    group = metadata.groups[kv.group]
    if window != (group.window if group.chunk is None else None) or len(group.slots_T) != rows:
        return False
    if "alone" not in group.extra:
        group.extra["alone"] = cpu_decode.attends(q_BHC, kv, metadata.block_size)
    if not group.extra["alone"]:
        return False
    context.called[layer] = context.called.get(layer, 0) + 1
    backend.decode_words(group, metadata).set(job, kv)
    return True


def _shape_of(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} key-value heads of {sizes[1]} and {sizes[2]} numbers"


def attend_latent(layer: int, q_1HTC: Tensor, latent_11TW: Tensor, up_HDR: Tensor, scale: float) -> Tensor:
    """Attend to latents in one layer of the current pass; returns (1, T, H, V), shapes as in attention/latent.py.

    Raises:
        ModelError: the layer has no latents in the text model, or their size is another.
    """
    context = current()
    kv, latent_TW = context.kv.get(layer), latent_11TW[0, 0]
    if not isinstance(kv, LayerLatent) or kv.latents.shape[2] != latent_TW.shape[1]:
        raise ModelError(f"Attention was called for layer {layer}, which has no such latents in the text model.")
    metadata, tail = context.metadata, context.tail
    if tail is not None and layer >= tail.first_layer:
        if tail.storing:
            context.backend.store_latent(latent_TW, kv, metadata)
            tail.stored = True
            return _latent_shape(q_1HTC, latent_11TW, up_HDR).zero_()
        metadata = tail.metadata
    context.called[layer] = context.called.get(layer, 0) + 1
    q_THC = q_1HTC[0].transpose(0, 1)
    return context.backend.attend_latent(q_THC, latent_TW, up_HDR, kv, metadata, scale).unsqueeze(0)


def attend_latent_row(
    layer: int, q_HC: Tensor, latent_W: Tensor, turn: LatentTurn, up_HDR: Tensor, scale: float
) -> Tensor:
    """Attend to latents for a single row, given as products make it; returns (H, V), otherwise as `attend_latent`."""
    context = current()
    kv, metadata = context.kv.get(layer), context.metadata
    alone = context.tail is None and not metadata.stored and metadata.num_decodes == len(metadata.starts) == 1
    if (
        not alone
        or not isinstance(kv, LayerLatent)
        or kv.latents.shape[2] != latent_W.numel()
        or not up_HDR.is_contiguous()
    ):
        q_1HC, latent_1W = turned(q_HC.unsqueeze(0), latent_W.unsqueeze(0), turn)
        return attend_latent(layer, q_1HC.transpose(0, 1).unsqueeze(0), latent_1W[None, None], up_HDR, scale)[0, 0]
    context.called[layer] = context.called.get(layer, 0) + 1
    return context.backend.attend_latent_row(q_HC, latent_W, turn, up_HDR, kv, metadata, scale)


def _crossing(layer: int) -> tuple[CrossContext, int]:
    """Return the pass's states and the layer's place in them, and count the call.

    Raises:
        ModelError: the pass has no states for this layer.
    """
    cross = current().cross
    if cross is None or layer not in cross.index_by_layer:
        raise ModelError(f"Cross attention was called for layer {layer}, which has no states to attend to.")
    cross.called[layer] = cross.called.get(layer, 0) + 1
    return cross, cross.index_by_layer[layer]


def attend_cross(layer: int, q_1THC: Tensor, scale: float) -> Tensor:
    """Attend to the states of items in one layer of the current pass; returns (1, T, H, C).

    Raises:
        ModelError: the pass has no states for this layer.
    """
    cross, index = _crossing(layer)
    if layer in cross.watched:
        cross.watched[layer] = q_1THC[0].float() * scale
    return cross.backend.attend(q_1THC[0], index, cross.metadata, scale).unsqueeze(0)


def attend_merged(
    layer: int, q_1HTC: Tensor, k_1KTC: Tensor, v_1KTC: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attend to known positions and to the states of items by one softmax; returns (1, T, H, C).

    Raises:
        ModelError: the pass has no states for this layer; or as attend_layer.
    """
    cross, index = _crossing(layer)
    q_THC = q_1HTC[0].transpose(0, 1)
    further = cross.backend.attend_with_sums(q_THC, index, cross.metadata, scale)
    return attend_layer(layer, q_1HTC, k_1KTC, v_1KTC, window, scale, None, further=further)


def states_at(layer: int, places_T: Tensor) -> Tensor:
    """Return, for each token, the state of its item at a place of its own: (T, 2, K, C).

    It is zero for tokens without an item, and after an item's last state.

    Raises:
        ModelError: the pass has no states for this layer.
    """
    cross, index = _crossing(layer)
    return read_states(cross.metadata.runs, index, places_T)


def number_layers(model: Any, give: Callable[[Any, str, Any], None] = setattr) -> int:
    """Set the layer index as a tensor on every module that has one, for compiled code; returns the number of modules.

    Args:
        give: sets an attribute of a module.
    """
    numbered = 0
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            # On the CPU, where reading it does not synchronize; not a buffer, because it must not move with the model.
            give(module, "layer_number", torch.tensor(layer, device="cpu"))
            numbered += 1
    return numbered


def _attend(
    q_1HTC: Tensor,
    k_1KTC: Tensor,
    v_1KTD: Tensor,
    layer: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    return attend_layer(int(layer), q_1HTC, k_1KTC, v_1KTD, window, scale, softcap, sinks_H)


def _attend_shape(
    q_1HTC: Tensor,
    k_1KTC: Tensor,
    v_1KTD: Tensor,
    layer: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Describe the result for torch.compile."""
    return q_1HTC.new_empty((1, q_1HTC.shape[2], q_1HTC.shape[1], v_1KTD.shape[3]))


def _attend_latent(q_1HTC: Tensor, latent_11TW: Tensor, up_HDR: Tensor, layer: Tensor, scale: float) -> Tensor:
    return attend_latent(int(layer), q_1HTC, latent_11TW, up_HDR, scale)


def _latent_shape(
    q_1HTC: Tensor, latent_11TW: Tensor, up_HDR: Tensor, layer: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Describe the result for torch.compile."""
    _, heads, tokens, size = q_1HTC.shape
    values = up_HDR.shape[1] + latent_11TW.shape[3] - up_HDR.shape[2] - size
    return q_1HTC.new_empty((1, tokens, heads, values))


operators.register(
    "attend(Tensor q, Tensor k, Tensor v, Tensor layer, int? window, float scale, float? softcap, Tensor? sinks)"
    " -> Tensor",
    _attend,
    _attend_shape,
)
operators.register(
    "attend_latent(Tensor q, Tensor latent, Tensor up, Tensor layer, float scale) -> Tensor",
    _attend_latent,
    _latent_shape,
)
