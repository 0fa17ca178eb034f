"""Gemma 4: audio of different lengths, and layers at the end that read the cache of others.

What its tower gives for audio holds places after the end of the shorter items, which its mask names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from beheld.attention.context import tail
from beheld.families._shared import per_layer
from beheld.families.model import FamilyModel
from beheld.models.surgery.operation import Changes


def audio_features(model: Any, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
    """Embeddings of all audio items, one after the other: (sum of E, H).

    Args:
        model: Gemma4ForConditionalGeneration.
        input_features: (items, frames, mel bins).
        input_features_mask: (items, frames), true for frames of the audio.
    """
    made = model.model.get_audio_features(input_features, input_features_mask, return_dict=True)
    heard: Tensor = made.pooler_output[made.attention_mask]
    return heard


def tail_from(model: Any, changes: Changes) -> int | None:
    """Let layers that read another's keys take a pass's tail alone; the first of them, None if there are none.

    Args:
        model: Gemma4ForConditionalGeneration.
    """
    text = model.model.language_model
    shared = getattr(text.config, "num_kv_shared_layers", 0) or 0
    # These layers are run with further columns alone: see `_of_tail`.
    if not shared or not text.config.hidden_size_per_layer_input:
        return None
    first = len(text.layers) - shared
    for index, layer in enumerate(text.layers[first:]):
        changes.set(layer, "forward", _of_tail(layer.forward, index == 0))
    return int(first)


def keywords(model: Any, positions_1T: Tensor) -> dict[str, Any]:
    """No number of rows: given one, layers that read another's keys would be run for so many, and want columns."""
    return {"logits_to_keep": slice(None)}


def _of_tail(forward: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """A layer's forward that takes only the rows of the tail, of what comes to it for all tokens."""

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
