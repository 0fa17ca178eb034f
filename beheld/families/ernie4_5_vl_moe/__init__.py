"""ERNIE 4.5 VL: separate experts for text and for media; the main branch's layout is converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.families.family import IMAGE_AND_VIDEO, Family, KnownCheckpoint, ReferenceOptions

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
# Our entry -> the main branch's entry, for ids that differ from the class's defaults.
_ERNIE_IDS = {
    "image_token_id": "im_patch_id",
    "image_start_token_id": "image_start_token_id",
    "image_end_token_id": "image_end_token_id",
    "video_start_token_id": "video_start_token_id",
    "video_end_token_id": "video_end_token_id",
    "video_token_id": "video_token_id",
}


def _ernie(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert the main branch of baidu/ERNIE-4.5-VL-28B-A3B-PT, whose text entries are at the top level.

    Its configuration counts experts for text and for vision, which must be equal; layers with experts are given by the
    first and last index, for each of the two, and a step.
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
        raise ValueError(f"the numbers in moe_num_experts {raw['moe_num_experts']} differ")
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
    """Split half a head over the axes: `freq_allocation` pairs for time, the rest equally for height and width."""
    half = raw["hidden_size"] // raw["num_attention_heads"] // 2
    time = int(raw.get("freq_allocation") or 20)
    return [(half - time) // 2, (half - time) // 2, time]


FAMILY = Family(
    model_types=("ernie4_5_vl_moe", "ernie4_5_moe_vl"),
    tested=(
        KnownCheckpoint(
            "ernie4_5_vl_moe",
            "Ernie4_5_VLMoeForConditionalGeneration",
            "baidu/ERNIE-4.5-VL-28B-A3B-PT",
            IMAGE_AND_VIDEO,
            "separate experts for media; three-axis positions; timestamps are drawn on the frames, with the font in "
            "the checkpoint's folder, or else with Pillow's; of the main branch, without its code: config.json, "
            "tokenizer.model (with the packages sentencepiece and protobuf) and preprocessor_config.json are "
            "converted; its folder holds no font, and Roboto-Regular.ttf added to it gives the letters of the "
            "training; any other setting of it is refused",
            on_gpu=True,
        ),
    ),
    convert={"ernie4_5_moe_vl": _ernie},
    reference=ReferenceOptions(rewrites=True),
    calls=("hermes",),
    reasoning=("ernie45", "think"),
)
