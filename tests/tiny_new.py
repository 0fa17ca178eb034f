"""Small random checkpoints of newer families, each with something of its own in its layers or its positions.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PIL import ImageFont

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import chat, language, pixels, qwen_tokens

SEEDS: dict[str, int] = {
    "hunyuan_vl": 1,
    "ernie4_5_vl_moe": 1,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

# --- HunyuanOCR ------------------------------------------------------------------------------------------------------

HUNYUAN_BEGIN, HUNYUAN_USER, HUNYUAN_END = (
    "<｜hy_begin▁of▁sentence｜>",
    "<｜hy_User｜>",
    "<｜hy_Assistant｜>",
)
HUNYUAN_IMAGE = tuple(f"<｜hy_place▁holder▁no▁{number}｜>" for number in (100, 102, 101))


def make_hunyuan_vl(path: Path) -> None:
    """As tencent/HunyuanOCR: positions of four axes, norms behind the rotary embedding, rows ended by a newline.

    The configuration is flat, as in the repository: what belongs to the text stands at the top.
    """
    form = chat("", HUNYUAN_USER, "".join(HUNYUAN_IMAGE), bos=HUNYUAN_BEGIN)
    named = {
        "bos_token": HUNYUAN_BEGIN,
        "image_start_token": HUNYUAN_IMAGE[0],
        "image_token": HUNYUAN_IMAGE[1],
        "image_end_token": HUNYUAN_IMAGE[2],
    }
    marks = (HUNYUAN_BEGIN, HUNYUAN_USER, HUNYUAN_END, *HUNYUAN_IMAGE)
    ids = qwen_tokens(path, "HunYuanVLProcessor", marks, named | {"chat_template": form})
    rope = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = tiny.LLAMA_SHAPE | {
        "architectures": ["HunYuanVLForConditionalGeneration"],
        "attention_bias": False,
        "attention_head_dim": 16,
        "bos_token_id": ids[HUNYUAN_BEGIN],
        "eos_token_id": ids[HUNYUAN_END],
        "head_dim": 16,
        "hidden_act": "silu",
        "image_end_token_id": ids[HUNYUAN_IMAGE[2]],
        "image_start_token_id": ids[HUNYUAN_IMAGE[0]],
        "image_token_id": ids[HUNYUAN_IMAGE[1]],
        "max_position_embeddings": 4096,
        "model_type": "hunyuan_vl",
        "org_vocab_size": tiny.VOCAB,
        "pad_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": rope | {"type": "xdrope", "xdrope_section": [2, 2, 2, 2]},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vision_config": {
            "hidden_act": "gelu",
            "hidden_size": 32,
            "intermediate_size": 48,
            "interpolate_mode": "bilinear",
            "max_image_size": 112,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
        },
    }
    sizes = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 32, "merge_size": 2, "patch_size": 14}
    files = pixels("HunYuanVLImageProcessor", "HunYuanVLProcessor", temporal_patch_size=1, **sizes)
    text.write_json(path / "preprocessor_config.json", files)
    generation = {"do_sample": True, "eos_token_id": [ids[HUNYUAN_END]], "pad_token_id": ids["<|endoftext|>"]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["hunyuan_vl"], keep=(HUNYUAN_END,))


# --- ERNIE 4.5 VL ----------------------------------------------------------------------------------------------------

ERNIE_MARKS = tuple(f"<|{kind}_{part}|>" for kind in ("IMAGE", "VIDEO") for part in ("START", "PLACEHOLDER", "END"))
ERNIE_MARKERS = ("Picture 1:" + "".join(ERNIE_MARKS[:3]), "Video 1:" + "".join(ERNIE_MARKS[3:]))


def make_ernie4_5_vl_moe(path: Path) -> None:
    """As baidu/ERNIE-4.5-VL-28B-A3B-PT at refs/pr/11: experts for text and others for vision, times on the frames."""
    names = ("image_start", "image", "image_end", "video_start", "video", "video_end")
    named = {f"{name}_token": mark for name, mark in zip(names, ERNIE_MARKS, strict=True)}
    form = chat("%role%: ", "", *ERNIE_MARKERS, bos="<|begin_of_sentence|>").replace("message.role", "'User'")
    form += "{%- if add_generation_prompt -%}{{- '\\nAssistant: ' -}}{%- endif -%}"
    marks = ("<|begin_of_sentence|>", *ERNIE_MARKS)
    ids = qwen_tokens(path, "Ernie4_5_VLMoeProcessor", marks, named | {"chat_template": form})
    config = {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "model_type": "ernie4_5_vl_moe",
        **{f"{name}_token_id": ids[mark] for name, mark in zip(names, ERNIE_MARKS, strict=True)},
        "text_config": language(
            "ernie4_5_vl_moe_text",
            "Ernie4_5_VLMoeForConditionalGeneration",
            mlp_layer_types=["dense", "sparse", "sparse"],
            moe_intermediate_size=[48, 16],
            moe_k=2,
            moe_num_experts=4,
            moe_num_shared_experts=1,
            rope_parameters={"mrope_section": [3, 3, 2], "rope_theta": 500000.0, "rope_type": "default"},
            use_bias=False,
        ),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "depth": 2,
            "hidden_act": "quick_gelu",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "model_type": "ernie4_5_vl_moe_vision",
            "num_heads": 2,
            "patch_size": 14,
            "rms_norm_eps": 1e-6,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
        },
    }
    _ernie_pixels(path)
    tiny._write_model(
        path,
        config,
        tiny._qwen_generation(ids),
        ids,
        seed=SEEDS["ernie4_5_vl_moe"],
        keep=("<|im_end|>",),
        adjust=_quiet_biases,
    )


def _quiet_biases(model: Any) -> None:
    """The routers' corrections small beside their probabilities, lest they alone decide."""
    for name, weight in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            weight.mul_(0.2)


def _ernie_pixels(path: Path) -> None:
    owner, sizes = "Ernie4_5_VLMoeProcessor", {"merge_size": 2, "patch_size": 14}
    size = {"longest_edge": 32 * 28 * 28, "shortest_edge": 4 * 28 * 28}
    files = pixels("Ernie4_5_VLMoeImageProcessor", owner, size=size, temporal_patch_size=1, **sizes)
    text.write_json(path / "preprocessor_config.json", files)
    clip = pixels("", owner, size={"longest_edge": 8 * 28 * 28, "shortest_edge": 28 * 28}, **sizes)
    del clip["image_processor_type"]
    own = {"draw_on_frames": True, "font": "Font-Regular.ttf", "fps": 2, "max_frames": 180, "min_frames": 2}
    text.write_json(
        path / "video_preprocessor_config.json",
        clip | own | {"temporal_patch_size": 2, "video_processor_type": "Ernie4_5_VLMoeVideoProcessor"},
    )
    (path / "Font-Regular.ttf").write_bytes(ImageFont.load_default(12).font_bytes)


TINY: dict[str, Callable[[Path], None]] = {
    "hunyuan_vl": make_hunyuan_vl,
    "ernie4_5_vl_moe": make_ernie4_5_vl_moe,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("ernie4_5_vl_moe",)
FORMS["hunyuan_vl"] = f"{HUNYUAN_BEGIN}{{}}{HUNYUAN_USER}"
FORMS["ernie4_5_vl_moe"] = "<|begin_of_sentence|>User: {}\nAssistant: "
MARKERS["hunyuan_vl"] = ("".join(HUNYUAN_IMAGE), "")
MARKERS["ernie4_5_vl_moe"] = ERNIE_MARKERS
