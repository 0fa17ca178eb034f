"""Phi-4-multimodal: media are read with LoRA adapters of the checkpoint; the main revision is converted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from beheld.families.family import IMAGE_AND_AUDIO, Family, KnownCheckpoint, ReferenceOptions, ShortName

# The class's audio entry -> the main revision's entry; the others have the same names.
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
# Values that transformers' class has fixed.
_PHI_BIASES = ("attention_bias", "mlp_bias", "lm_head_bias")
_PHI_IMAGES = {
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


def _phi4mm(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert the main revision of microsoft/Phi-4-multimodal-instruct: text at the top level, towers in `embd_layer`.

    The image tower's sizes and both placeholders' ids are in that repository's code, and are the class's defaults. A
    smaller checkpoint's `vision_config` and `audio_config` override them.
    """
    images, audios = raw["embd_layer"]["image_embd_layer"], raw["embd_layer"]["audio_embd_layer"]
    for name, built in _PHI_IMAGES.items():
        if images.get(name, built) != built:
            raise ValueError(f"{name} {images[name]!r} is not {built!r}")
    for name in _PHI_BIASES:
        if raw.get(name):
            raise ValueError(f"{name} is set")
    settings = raw["audio_processor"]["config"]
    audio = {ours: settings[theirs] for ours, theirs in _PHI_AUDIO.items() if theirs in settings} | {
        "bias_max_distance": settings["relative_attention_bias_args"]["t5_bias_max_distance"],
        "downsample_rate": audios["downsample_rate"],
        "nemo_conv_channels": settings["nemo_conv_settings"]["conv_channels"],
    }
    made: dict[str, Any] = {name: copy.deepcopy(raw[name]) for name in _PHI_TEXT if name in raw}
    if (made.get("sliding_window") or 0) >= raw["max_position_embeddings"]:
        # No sequence is that long, and layers without a window share their blocks more freely.
        made["sliding_window"] = None
    made |= {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "audio_config": audio | dict(raw.get("audio_config") or {}),
        "vision_config": {"crop_size": images["crop_size"]} | dict(raw.get("vision_config") or {}),
    }
    return "phi4_multimodal", made


def _placeholders(config: Any) -> dict[str, int]:
    """Return the placeholders' ids from the towers' configurations."""
    return {"image": config.vision_config.image_token_id, "audio": config.audio_config.audio_token_id}


FAMILY = Family(
    model_types=("phi4_multimodal", "phi4mm"),
    short_names=(
        ShortName(
            "phi-4-multimodal", "microsoft/Phi-4-multimodal-instruct", "phi4_mm", "MIT", 5.6, "images and speech"
        ),
    ),
    tested=(
        KnownCheckpoint(
            "phi4_mm",
            "Phi4MultimodalForCausalLM",
            "microsoft/Phi-4-multimodal-instruct",
            IMAGE_AND_AUDIO,
            "images and audio are read with the checkpoint's adapters, both together with the image adapter; each "
            "audio is read as if it were the only one of its prompt; a sequence keeps the rotary scale of its "
            "prompt; the main revision's layout and transformers'",
            on_gpu=True,
        ),
    ),
    convert={"phi4mm": _phi4mm},
    placeholders=_placeholders,
    adapters=(("image", "vision-lora"), ("audio", "speech-lora")),
    reference=ReferenceOptions(attention="eager", merges_inside=True, rewrites=True),
    calls=("phi4_mini_json",),
)
