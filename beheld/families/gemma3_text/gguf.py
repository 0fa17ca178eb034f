"""What a GGUF file of Gemma 3 means and does not state, and what it states of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError

# Every so many layers one sees all positions, unless the file says otherwise; the others' positions are not scaled.
_PERIOD = 6
_LOCAL_THETA = 10_000.0
# The largest model, by its number of layers, divides scores by the share of the hidden size that a head has.
_LARGEST = 62


def config(made: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        made: what all text models have.
        said: the file's entries.

    Raises:
        ModelError: the file states no window, or the layers that have it otherwise than by a period.
    """
    if "sliding_window" not in made:
        raise ModelError("A GGUF file of Gemma 3 states no attention.sliding_window.", "Convert the model again.")
    layers, period = made["num_hidden_layers"], said.get("attention.sliding_window_pattern", _PERIOD)
    if type(period) is not int or period < 1:
        raise ModelError(
            f"A GGUF file of Gemma 3 states attention.sliding_window_pattern as {period!r}; expected a whole number "
            "from 1.",
            "Use the model's checkpoint in transformers' layout instead.",
        )
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    head = made["hidden_size"] // made["num_attention_heads"] if layers == _LARGEST else made["head_dim"]
    local = {"rope_theta": float(said.get("rope.freq_base_swa", _LOCAL_THETA)), "rope_type": "default"}
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "query_pre_attn_scalar": head,
        "rope_parameters": {"full_attention": made["rope_parameters"], "sliding_attention": local},
        "attention_bias": False,
    }
    return {name: value for name, value in made.items() if name != "hidden_act"} | own


def entries(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `config` makes this content of config.json from: what all text models have, and the file's entries.

    Layers whose windows follow no period get the period that fits the first of them.
    """
    kinds, positions = list(content["layer_types"]), content["rope_parameters"]
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    local = float(positions["sliding_attention"]["rope_theta"])
    made = {**content, "hidden_act": content["hidden_activation"], "rope_parameters": positions["full_attention"]}
    return made, {"attention.sliding_window_pattern": period, "rope.freq_base_swa": local}
