"""Configurations of repositories that bring their own code, as those of the classes that transformers has for them.

Only names and layout change here; the weights' names are transformers' own concern, which knows the old ones, or, where
it does not, that of models/families.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from beheld.core.errors import ModelError


def converted(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Model type and content of the configuration `raw` stands for, if it is of a repository known here.

    Raises:
        ModelError: it lacks an entry without which nothing can be said of the model.
    """
    convert = _CONVERT.get(raw.get("model_type") or "")
    if convert is None:
        return None
    try:
        return convert(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"config.json is of the type {raw['model_type']!r}, but cannot be read as one: {error!r}.",
            "Fetch the checkpoint again.",
        ) from error


def own_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for transformers' loaders, which would read config.json themselves: ours, where theirs could not."""
    known = converted(raw)
    if known is None:
        return {}
    from transformers import AutoConfig

    return {"config": AutoConfig.for_model(known[0], **known[1])}


_ERNIE_VISION = ("depth", "hidden_act", "hidden_size", "in_channels", "num_heads", "patch_size", "spatial_merge_size")
_ERNIE_TEXT = (
    "bos_token_id",
    "eos_token_id",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "moe_k",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_bias",
    "vocab_size",
)
# Entry of ours -> entry there, for ids that are not the class's own.
_ERNIE_IDS = {
    "image_token_id": "im_patch_id",
    "image_start_token_id": "image_start_token_id",
    "image_end_token_id": "image_end_token_id",
    "video_start_token_id": "video_start_token_id",
    "video_end_token_id": "video_end_token_id",
    "video_token_id": "video_token_id",
}


def _ernie(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The main branch of baidu/ERNIE-4.5-VL-28B-A3B-PT: what belongs to the text stands at the top.

    Its experts are counted for text and for vision, which are as many; layers with experts are named by their first and
    last, for each of the two, and by their distance.
    """
    vision, layers = raw["vision_config"], range(raw["num_hidden_layers"])
    own = {name: vision[name] for name in _ERNIE_VISION}
    own |= {
        "intermediate_size": int(vision["hidden_size"] * vision["mlp_ratio"]),
        "rms_norm_eps": 1e-6,
        "temporal_merge_size": raw["temporal_conv_size"],
        "spatial_merge_size": raw["spatial_conv_size"],
    }
    counts = set(raw["moe_num_experts"])
    if len(counts) != 1:
        raise ValueError(f"moe_num_experts {raw['moe_num_experts']} differ")
    first, last = min(raw["moe_layer_start_index"]), max(raw["moe_layer_end_index"])
    interval = raw.get("moe_layer_interval") or 1
    sparse = [first <= layer <= last and (layer + 1) % interval == 0 for layer in layers]
    text = {name: raw[name] for name in _ERNIE_TEXT if name in raw}
    text |= {
        "mlp_layer_types": ["sparse" if yes else "dense" for yes in sparse],
        "moe_num_experts": counts.pop(),
        "moe_num_shared_experts": raw.get("moe_num_shared_experts") or 0,
        "rope_parameters": {
            "mrope_section": _ernie_sections(raw),
            "rope_theta": float(raw.get("rope_theta") or 500000.0),
            "rope_type": "default",
        },
    }
    made: dict[str, Any] = {
        ours: raw[theirs] for ours, theirs in _ERNIE_IDS.items() if theirs in raw or theirs == "im_patch_id"
    }
    made |= {"text_config": text, "vision_config": own, "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"]}
    for name in ("tie_word_embeddings", "torch_dtype", "dtype"):
        if name in raw:
            made[name] = raw[name]
    return "ernie4_5_vl_moe", made


def _ernie_sections(raw: Mapping[str, Any]) -> list[int]:
    """Height, width and time share half a head: `freq_allocation` pairs go to time, the rest equally to the others."""
    half = raw["hidden_size"] // raw["num_attention_heads"] // 2
    time = int(raw.get("freq_allocation") or 20)
    return [(half - time) // 2, (half - time) // 2, time]


# Entry of ours -> entry there, for names of DaViT's that are not the class's own.
_DAVIT = {"embed_dim": "dim_embed"} | {
    name: name
    for name in (
        *("depths", "drop_path_rate", "num_groups", "num_heads", "projection_dim", "window_size"),
        *("patch_padding", "patch_prenorm", "patch_size", "patch_stride"),
    )
}
_FLORENCE_SOURCES = ["spatial_avg_pool", "temporal_avg_pool"]


def _florence2(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """microsoft/Florence-2-large: a tower named davit, and a placeholder whose id lies behind the table of embeddings.

    Its processor adds that token; there is no row for it, since it only marks places.
    """
    vision, text = raw["vision_config"], raw["text_config"]
    if "dim_embed" not in vision:
        return None
    if list(vision["image_feature_source"]) != _FLORENCE_SOURCES:
        raise ValueError(f"image_feature_source {vision['image_feature_source']} is not {_FLORENCE_SOURCES}")
    tower = {ours: vision[theirs] for ours, theirs in _DAVIT.items() if theirs in vision} | {
        "max_position_embeddings": vision["image_pos_embed"]["max_pos_embeddings"],
        "max_temporal_embeddings": vision["visual_temporal_embedding"]["max_temporal_embeddings"],
    }
    made: dict[str, Any] = {
        "architectures": ["Florence2ForConditionalGeneration"],
        "image_token_id": text["vocab_size"],
        "text_config": {**text, "model_type": "bart"},
        "tie_word_embeddings": True,
        "vision_config": tower,
    }
    made |= {name: raw[name] for name in ("torch_dtype", "dtype") if name in raw}
    return "florence2", made


# Entry of the class for sounds -> entry there; the rest have the same names.
_PHI_AUDIO = {
    "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
    "hidden_size": "attention_dim",
    "intermediate_size": "linear_units",
    "num_attention_heads": "attention_heads",
} | {
    name: name
    for name in (
        *("activation", "chunk_size", "conv_activation", "conv_glu_type", "depthwise_multiplier", "dropout_rate"),
        *("ext_pw_out_channel", "input_size", "kernel_size", "left_chunk", "num_blocks", "time_reduction"),
    )
}
_PHI_TEXT = (
    "attention_dropout",
    "bos_token_id",
    "embd_pdrop",
    "eos_token_id",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "pad_token_id",
    "partial_rotary_factor",
    "resid_pdrop",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
    "torch_dtype",
    "dtype",
)
# What transformers' class computes and cannot compute otherwise.
_PHI_BIASES = ("attention_bias", "mlp_bias", "lm_head_bias")
_PHI_IMAGES = {
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


def _phi4mm(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The main revision of microsoft/Phi-4-multimodal-instruct: the text at the top, the towers in `embd_layer`.

    The sizes of the tower for pictures and the ids of both markers stand in that repository's code, and are the
    class's own. Where a smaller checkpoint names others, in `vision_config` and `audio_config`, those hold.
    """
    images, sounds = raw["embd_layer"]["image_embd_layer"], raw["embd_layer"]["audio_embd_layer"]
    for name, built in _PHI_IMAGES.items():
        if images.get(name, built) != built:
            raise ValueError(f"{name} {images[name]!r} is not {built!r}")
    for name in _PHI_BIASES:
        if raw.get(name):
            raise ValueError(f"{name} is set")
    said = raw["audio_processor"]["config"]
    audio = {ours: said[theirs] for ours, theirs in _PHI_AUDIO.items() if theirs in said} | {
        "bias_max_distance": said["relative_attention_bias_args"]["t5_bias_max_distance"],
        "downsample_rate": sounds["downsample_rate"],
        "nemo_conv_channels": said["nemo_conv_settings"]["conv_channels"],
    }
    made: dict[str, Any] = {name: copy.deepcopy(raw[name]) for name in _PHI_TEXT if name in raw}
    if (made.get("sliding_window") or 0) >= raw["max_position_embeddings"]:
        # No sequence is so long, and layers without a window share their blocks more freely.
        made["sliding_window"] = None
    made |= {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "audio_config": audio | dict(raw.get("audio_config") or {}),
        "vision_config": {"crop_size": images["crop_size"]} | dict(raw.get("vision_config") or {}),
    }
    return "phi4_multimodal", made


# What a flat GLM-4V configuration says of the whole; all else at its top is the text's.
_GLM_WHOLE = frozenset(
    (
        *("architectures", "auto_map", "dtype", "model_type", "tie_word_embeddings", "torch_dtype"),
        *("quantization_config", "transformers_version", "vision_config"),
        *(f"{kind}{part}_token_id" for kind in ("image", "video") for part in ("", "_start", "_end")),
    )
)


def _glm4v(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """zai-org/GLM-4.1V-9B-Thinking as it was first published: what belongs to the text stands at the top.

    transformers' class leaves such entries there and gives the text its defaults.
    """
    if "text_config" in raw or "hidden_size" not in raw:
        return None
    made = {name: copy.deepcopy(raw[name]) for name in raw if name in _GLM_WHOLE and name != "model_type"}
    made["text_config"] = {name: copy.deepcopy(raw[name]) for name in raw if name not in _GLM_WHOLE}
    return "glm4v", made


_CONVERT: dict[str, Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]] | None]] = {
    "ernie4_5_moe_vl": _ernie,
    "florence2": _florence2,
    "glm4v": _glm4v,
    "phi4mm": _phi4mm,
}
