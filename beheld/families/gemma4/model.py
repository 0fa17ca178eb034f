"""Gemma 4: audio of different lengths, and final layers that read other layers' caches.

Its tower's audio output contains padding after shorter items, which its mask marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from beheld.attention.context import tail
from beheld.families._shared import per_layer
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes
from beheld.models.surgery.parts import text_model


def audio_features(model: Any, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
    """Return embeddings of all audio items, concatenated: (sum of E, H).

    Args:
        model: Gemma4ForConditionalGeneration.
        input_features: (items, frames, mel bins).
        input_features_mask: (items, frames), true for audio frames.
    """
    made = model.model.get_audio_features(input_features, input_features_mask, return_dict=True)
    embeds: Tensor = made.pooler_output[made.attention_mask]
    return embeds


def tail_from(model: Any, changes: Changes) -> int | None:
    """Let layers that read other layers' keys process only a pass's tail; return the first of them, if any.

    Args:
        model: Gemma4ForConditionalGeneration or Gemma4ForCausalLM.
    """
    text = text_model(model)
    shared = getattr(text.config, "num_kv_shared_layers", 0) or 0
    # Without the extra columns the model runs a different path, which computes its rows itself.
    if not shared or not text.config.hidden_size_per_layer_input:
        return None
    first = len(text.layers) - shared
    for index, layer in enumerate(text.layers[first:]):
        changes.set(layer, "forward", _of_tail(layer.forward, index == 0))
    return int(first)


def keywords(model: Any, positions_1T: Tensor) -> dict[str, Any]:
    """Ask for the logits of all positions with a slice: for a number, the model cuts inputs that may be missing."""
    return {"logits_to_keep": slice(None)}


def _of_tail(forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """Return a layer's forward that takes only the tail's rows from inputs for all tokens."""

    def shortened(hidden_states: Tensor, per_layer_input: Tensor, **kwargs: Any) -> Any:
        part = tail()
        if part is None:
            return forward(hidden_states, per_layer_input, **kwargs)
        rows_S = part.rows_S
        if first:
            hidden_states = hidden_states.index_select(1, rows_S)
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = cos.index_select(1, rows_S), sin.index_select(1, rows_S)
        return forward(hidden_states, per_layer_input.index_select(1, rows_S), **kwargs)

    return shortened


MODEL = FamilyModel(
    audio_features=audio_features, extra_columns=per_layer.extra_columns, keywords=keywords, tail_from=tail_from
)
