"""Small random checkpoints of families with a grid of patches per item and multi-axis positions, and of Aria.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS, QWEN_MARKERS, QWEN_TURN
from tests.tiny_more import chat, language, pixels, qwen_tokens

SEEDS: dict[str, int] = {
    "qwen3_vl": 1,
    "qwen3_vl_moe": 13,
    "glm4v": 2,
    "glm4v_moe": 3,
    "glm46v": 2,
    "aria": 2,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""


def grid_pixels(path: Path, owner: str, image: str, video: str, patch: int, **own: Any) -> None:
    """Both preprocessor files: at most 32 embeddings to a picture, few to a pair of frames."""
    side = 2 * patch
    shared = {"merge_size": 2, "patch_size": patch, "temporal_patch_size": 2} | own
    size = {"longest_edge": 32 * side * side, "shortest_edge": 4 * side * side}
    text.write_json(path / "preprocessor_config.json", pixels(image, owner, size=size, **shared))
    clip = pixels("", owner, size={"longest_edge": 128 * side * side, "shortest_edge": 8 * side * side}, **shared)
    del clip["image_processor_type"]
    text.write_json(path / "video_preprocessor_config.json", clip | {"video_processor_type": video})


# --- Qwen3-VL --------------------------------------------------------------------------------------------------------


def make_qwen3_vl(path: Path) -> None:
    """As Qwen/Qwen3-VL-4B-Instruct: interleaved axes, three tower layers that also enter the first text layers."""
    _qwen3(path, "qwen3_vl", "Qwen3VLForConditionalGeneration", {})


def make_qwen3_vl_moe(path: Path) -> None:
    """As Qwen/Qwen3-VL-30B-A3B-Instruct: the same with experts."""
    experts = {"decoder_sparse_step": 1, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    _qwen3(path, "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", experts)


def _qwen3(path: Path, kind: str, architecture: str, own: dict[str, Any]) -> None:
    marks = text.QWEN_SPECIALS[3:]
    ids = qwen_tokens(path, "Qwen3VLProcessor", marks, {"chat_template": text.QWEN_VISION_CHAT})
    rope = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
    config = {
        "architectures": [architecture],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": kind,
        "text_config": language(
            f"{kind}_text", architecture, head_dim=16, rope_scaling=rope, rope_theta=5000000.0, **own
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "deepstack_visual_indexes": [0, 1],
            "depth": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": kind,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }
    grid_pixels(path, "Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", 14)
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS[kind], keep=("<|im_end|>",))


# --- GLM -------------------------------------------------------------------------------------------------------------

GLM_MARKS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>")
GLM_MARKS += ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
GLM_MARKERS = (
    "<|begin_of_image|><|image|><|end_of_image|>",
    "<|begin_of_video|><|video|><|end_of_video|>",
)


def make_glm4v(path: Path) -> None:
    """As zai-org/GLM-4.1V-9B-Thinking: half of each head turned on three axes, norms around each sublayer."""
    _glm(path, "glm4v", "Glm4vForConditionalGeneration", "Glm4vProcessor", "Glm4v", {})


def make_glm46v(path: Path) -> None:
    """As zai-org/GLM-4.6V-Flash: the same with times in tenths of seconds."""
    _glm(path, "glm46v", "Glm46VForConditionalGeneration", "Glm46VProcessor", "Glm46V", {})


def make_glm4v_moe(path: Path) -> None:
    """As zai-org/GLM-4.5V: the same with experts after the first layer."""
    experts = {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    }
    _glm(path, "glm4v_moe", "Glm4vMoeForConditionalGeneration", "Glm4vProcessor", "Glm4v", experts)


def _glm(path: Path, kind: str, architecture: str, owner: str, processor: str, own: dict[str, Any]) -> None:
    form = chat("<|%role%|>\\n", "", *GLM_MARKERS, bos="[gMASK]<sop>")
    form += "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
    ids = qwen_tokens(path, owner, GLM_MARKS, {"chat_template": form})
    rope = {"mrope_section": [2, 1, 1], "rope_type": "default"}
    config = {
        "architectures": [architecture],
        "image_end_token_id": ids["<|end_of_image|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_token_id": ids["<|image|>"],
        "model_type": kind,
        "text_config": language(
            "glm4v_moe_text" if own else "glm4v_text",
            architecture,
            partial_rotary_factor=0.5,
            rope_scaling=rope,
            **({"head_dim": 16} if own else {}),
            **own,
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "video_end_token_id": ids["<|end_of_video|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_token_id": ids["<|video|>"],
        "vision_config": {
            "attention_bias": False,
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 32,
            "image_size": 84,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": "glm4v_moe_vision" if own else "glm4v_vision",
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    grid_pixels(path, owner, f"{processor}ImageProcessor", f"{processor}VideoProcessor", 14)
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS[kind], keep=("<|im_end|>",))


# --- Aria ------------------------------------------------------------------------------------------------------------


def make_aria(path: Path) -> None:
    """As rhymes-ai/Aria: a picture asked by learned queries, experts beside shared ones.

    The processor knows pictures of 490 or 980 pixels only, so a patch here has 98.
    """
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<fim_prefix><|img|><fim_suffix>")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    marks = ("<fim_prefix>", "<|img|>", "<fim_suffix>")
    ids = qwen_tokens(path, "AriaProcessor", marks, {"chat_template": form, "image_token": "<|img|>"})
    config = {
        "architectures": ["AriaForConditionalGeneration"],
        "image_token_index": ids["<|img|>"],
        "model_type": "aria",
        "projector_patch_to_query_dict": {"25": 8, "100": 16},
        "text_config": language(
            "aria_text",
            "AriaForCausalLM",
            moe_num_experts=4,
            moe_num_shared_experts=2,
            moe_topk=2,
            intermediate_size=48,
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_size": 32,
            "image_size": 980,
            "intermediate_size": 64,
            "model_type": "idefics3_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "patch_size": 98,
        },
        "vision_feature_layer": -1,
    }
    size = {"max_image_size": 490, "min_image_size": 98, "split_image": False, "image_mean": tiny.HALF}
    files = pixels("AriaImageProcessor", "AriaProcessor", **size)
    del files["do_resize"]
    # The processor's own default of 980 wins over that file, as it does for the real checkpoint.
    text.write_json(path / "preprocessor_config.json", files)
    text.write_json(
        path / "processor_config.json",
        {"processor_class": "AriaProcessor", "size_conversion": {"490": 8, "980": 16}},
    )
    generation = tiny._qwen_generation(ids)
    tiny._write_model(
        path, config, generation, ids, seed=SEEDS["aria"], keep=("<|im_end|>",), adjust=_look_at_every_seventh_pixel
    )


def _look_at_every_seventh_pixel(model: Any) -> None:
    """As many of a patch's pixels as the real one has, which is 14 wide, with the sum's size kept.

    Over all 98 x 98 x 3 of them transformers' convolution rounds so much that its log-probabilities in float32 are off
    those in float64 by 1e-4, which is all that an answer may differ by.
    """
    weight = model.get_submodule("model.vision_tower.embeddings.patch_embedding").weight
    kept = weight[..., ::7, ::7] * 7
    weight.zero_()
    weight[..., ::7, ::7] = kept


TINY: dict[str, Callable[[Path], None]] = {
    "qwen3_vl": make_qwen3_vl,
    "qwen3_vl_moe": make_qwen3_vl_moe,
    "glm4v": make_glm4v,
    "glm4v_moe": make_glm4v_moe,
    "glm46v": make_glm46v,
    "aria": make_aria,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = tuple(name for name in TINY if name != "aria")
GLM_TURN = "[gMASK]<sop><|user|>\n{}<|assistant|>\n"
FORMS.update(dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN_TURN))
FORMS.update(dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GLM_TURN))
FORMS["aria"] = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MARKERS.update(dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), QWEN_MARKERS))
MARKERS.update(dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), GLM_MARKERS))
MARKERS["aria"] = ("<fim_prefix><|img|><fim_suffix>", "")
