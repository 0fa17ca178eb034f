"""The configuration of Mistral's own layout: params.json.

Dense text models are read, alone or with Pixtral's tower; anything else that params.json names is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.core.errors import ModelError

PARAMS = "params.json"
MODEL_TYPE = "mistral-params"
_REMEDY = "Use the checkpoint in transformers' layout (config.json), which the same repository mostly holds too."
# Their entry -> transformers'.
_TEXT = {
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_TOWER = (
    *("hidden_size", "image_size", "intermediate_size", "num_attention_heads", "num_channels", "num_hidden_layers"),
    "patch_size",
)
# Read in another way, or without a meaning for a finished model.
_OTHERS = {
    *("activation", "max_position_embeddings", "max_seq_len", "model_type", "rope_theta", "sliding_window"),
    *("tied_embeddings", "vision_encoder"),
}
_OTHERS_OF_TOWER = {
    *("adapter_bias", "add_pre_mm_projector_layer_norm", "image_break_token_id", "image_end_token_id"),
    *("image_token_id", "max_image_size", "mm_projector_id", "rope_theta", "spatial_merge_size"),
}
_MERGES = "patch_merge"
# Positions of a model whose file states none: those of Mistral's models of 2024.
_POSITIONS = 128_000
_ACTIVATIONS = (None, "silu")
# Rotations of a text model whose file states none, and of one with sliding layers, the first of Mistral's.
_THETA, _THETA_OF_WINDOWS = 1_000_000.0, 10_000.0


def convert(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model type and the content of config.json of what params.json describes; see Family.convert.

    Raises:
        ModelError: it describes what is not read here.
    """
    params = raw["params"]
    text = _text(params)
    tower = params.get("vision_encoder")
    common = {name: raw[name] for name in ("torch_dtype",)}
    if tower is None:
        return "mistral", text | common | {"architectures": ["MistralForCausalLM"]}
    _refuse_others("vision_encoder", tower, {*_TOWER, *_OTHERS_OF_TOWER})
    merges = tower.get("mm_projector_id") == _MERGES
    if tower.get("mm_projector_id") not in (None, "", _MERGES):
        raise ModelError(f"{PARAMS} names the projector {tower['mm_projector_id']!r}, which is not known.", _REMEDY)
    if bool(tower.get("add_pre_mm_projector_layer_norm")) != merges:
        raise ModelError(f"{PARAMS} has a norm before the projector without merged patches, or not with them.", _REMEDY)
    # Both parts have feed-forward layers of one kind, whatever transformers takes for a tower that states none.
    seen = {name: tower[name] for name in _TOWER if name in tower} | {
        "hidden_act": "silu",
        "head_dim": tower["hidden_size"] // tower["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": tower.get("rope_theta", 10000.0)},
    }
    made: dict[str, Any] = common | {
        "image_token_index": tower["image_token_id"],
        "projector_hidden_act": "gelu",
        "text_config": text | {"model_type": "mistral"},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": seen | {"model_type": "pixtral"},
        "vision_feature_layer": -1,
    }
    bias = bool(tower.get("adapter_bias", True))
    if merges:
        return "mistral3", made | {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "multimodal_projector_bias": bias,
            "spatial_merge_size": tower["spatial_merge_size"],
        }
    return "llava", made | {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_seq_length": 1,
        "multimodal_projector_bias": bias,
        "vision_feature_select_strategy": "full",
    }


def _text(params: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others("", params, {*_TEXT, *_OTHERS})
    window, activation = params.get("sliding_window"), params.get("activation")
    if params.get("model_type", "transformer") != "transformer" or activation not in _ACTIVATIONS:
        raise ModelError(f"{PARAMS} describes {params.get('model_type')!r} with {activation!r}.", _REMEDY)
    if window is not None and type(window) is not int:
        raise ModelError(f"{PARAMS} has windows by layer ({window}), which are not read yet.", _REMEDY)
    wrong = next((name for name in _TEXT if type(params.get(name)) not in (int, float) or params[name] <= 0), None)
    if wrong is not None:
        raise ModelError(f"{PARAMS} has no number for {wrong}: {params.get(wrong)!r}.", "Fetch the checkpoint again.")
    positions = params.get("max_position_embeddings") or params.get("max_seq_len") or _POSITIONS
    theta = params.get("rope_theta") or (_THETA if window is None else _THETA_OF_WINDOWS)
    return {ours: params[theirs] for theirs, ours in _TEXT.items()} | {
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "sliding_window": window,
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
    }


def _refuse_others(where: str, given: Mapping[str, Any], known: set[str]) -> None:
    """Refuse entries that nothing here reads, unless they say that there is nothing to read."""
    others = sorted(name for name, value in given.items() if name not in known and value not in (None, False, 0, ""))
    if others:
        place = f"{where}." if where else ""
        raise ModelError(f"{PARAMS} has {place}{others[0]}, which is not read yet.", _REMEDY)
