"""Small random checkpoints of newer families, each with something of its own in its layers or its positions.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import ImageFont

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import CHATML_TURN, chat, language, pixels, qwen_tokens

SEEDS: dict[str, int] = {
    "hunyuan_vl": 1,
    "ernie4_5_vl_moe": 8,
    "llama4": 3,
    "molmo2": 2,
    "lfm2_vl": 3,
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


# --- Llama 4 ---------------------------------------------------------------------------------------------------------

LLAMA4_TURN = (
    "<|begin_of_text|><|header_start|>user<|header_end|>\n\n{}<|eot|><|header_start|>assistant<|header_end|>\n\n"
)
LLAMA4_MARKS = (
    "<|begin_of_text|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|eot|>",
    "<|image_start|>",
    "<|image_end|>",
)
LLAMA4_MARKS += ("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>")


def make_llama4(path: Path) -> None:
    """As meta-llama/Llama-4-Scout-17B-16E-Instruct: chunks of 32 positions, every third layer full, without rotary.

    Queries of those layers grow every 16 positions, so that tests of a few dozen tokens see it.
    """
    opening = "<|header_start|>%role%<|header_end|>\\n\\n"
    form = chat(opening, "<|eot|>", "<|image|>", bos="<|begin_of_text|>")
    form += "{%- if add_generation_prompt -%}{{- '" + opening.replace("%role%", "assistant") + "' -}}{%- endif -%}"
    ids = qwen_tokens(path, "Llama4Processor", LLAMA4_MARKS, {"chat_template": form})
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": ids["<|image_start|>"],
        "eoi_token_index": ids["<|image_end|>"],
        "image_token_index": ids["<|patch|>"],
        "model_type": "llama4",
        "text_config": language(
            "llama4_text",
            "Llama4ForConditionalGeneration",
            attention_chunk_size=32,
            attn_scale=0.3,
            attn_temperature_tuning=True,
            floor_scale=16,
            for_llm_compressor=False,
            head_dim=16,
            interleave_moe_layer_step=1,
            intermediate_size=48,
            intermediate_size_mlp=96,
            moe_layers=[1, 2],
            no_rope_layers=[1, 1, 0],
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_act": "gelu",
            "hidden_size": 32,
            "image_size": 56,
            "intermediate_size": 128,
            "model_type": "llama4_vision_model",
            "multi_modal_projector_bias": False,
            "norm_eps": 1e-5,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "rope_theta": 10000,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 48,
        },
    }
    sizes = {"image_mean": tiny.HALF, "image_std": tiny.HALF, "max_patches": 4, "resize_to_max_canvas": False}
    files = pixels("Llama4ImageProcessor", "Llama4Processor", size={"height": 56, "width": 56}, resample=2, **sizes)
    text.write_json(path / "preprocessor_config.json", files)
    settings = {
        "end_of_image_token": "<|image_end|>",
        "fake_image_token": "<|image|>",
        "image_token": "<|image|>",
        "patch_size": 14,
        "patch_token": "<|patch|>",
        "pixel_shuffle_ratio": 0.5,
        "processor_class": "Llama4Processor",
        "start_of_image_token": "<|image_start|>",
        "tile_token": "<|tile_x_separator|>",
        "tile_global_token": "<|tile_y_separator|>",
    }
    text.write_json(path / "processor_config.json", settings)
    generation = {"bos_token_id": ids["<|begin_of_text|>"], "do_sample": True, "eos_token_id": [ids["<|eot|>"]]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["llama4"], keep=("<|eot|>",))


# --- Molmo 2 ---------------------------------------------------------------------------------------------------------

MOLMO_MARKS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>")
MOLMO_MARKS += ("<frame_start>", "<frame_end>", "<|video|>")


def make_molmo2(path: Path) -> None:
    """As allenai/Molmo2-8B: crops that overlap, patches pooled by attention, special tokens in a table of their own.

    The last tower layer of the configuration has no weights, as in the repository.
    """
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<|image|>", "<|video|>")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ids = qwen_tokens(path, "Molmo2Processor", MOLMO_MARKS, {"chat_template": form})
    names = {
        "frame_end_token_id": "<frame_end>",
        "frame_start_token_id": "<frame_start>",
        "image_col_id": "<im_col>",
        "image_end_token_id": "<im_end>",
        "image_low_res_id": "<im_low>",
        "image_patch_id": "<im_patch>",
        "image_start_token_id": "<im_start>",
        "low_res_image_start_token_id": "<low_res_im_start>",
    }
    heads = {"head_dim": 16, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {
        "adapter_config": heads
        | {
            "attention_dropout": 0.0,
            "float32_attention": True,
            "hidden_act": "silu",
            "intermediate_size": 48,
            "model_type": "molmo2",
            "text_hidden_size": 64,
            "vit_layers": [-2, 0],
        },
        "architectures": ["Molmo2ForConditionalGeneration"],
        "model_type": "molmo2",
        "text_config": language(
            "molmo2_text",
            "Molmo2ForConditionalGeneration",
            additional_vocab_size=16,
            head_dim=16,
            qk_norm_type="qwen3",
            qkv_bias=False,
            use_qk_norm=True,
            vocab_size=ids["<im_start>"],
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_frame_special_tokens": True,
        "vit_config": heads
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "image_default_input_size": [56, 56],
            "image_num_pos": 16,
            "image_patch_size": 14,
            "intermediate_size": 48,
            "layer_norm_eps": 1e-6,
            "model_type": "molmo2",
            "num_hidden_layers": 3,
        },
        **{name: ids[token] for name, token in names.items()},
    }
    _molmo_pixels(path)
    generation = {"bos_token_id": ids["<|endoftext|>"], "do_sample": True, "eos_token_id": [ids["<|im_end|>"]]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["molmo2"], keep=("<|im_end|>",))


def _molmo_pixels(path: Path) -> None:
    owner = "Molmo2Processor"
    size = {"size": {"height": 56, "width": 56}, "image_mean": tiny.HALF, "image_std": tiny.HALF, "patch_size": 14}
    tiles = {"max_crops": 4, "overlap_margins": [1, 1], "pooling_size": [2, 2], "resample": 2}
    text.write_json(path / "preprocessor_config.json", pixels("Molmo2ImageProcessor", owner, **size | tiles))
    clip = pixels("", owner, **size | {"resample": 2})
    del clip["image_processor_type"]
    own = {"max_fps": 2, "num_frames": 64, "pooling_size": [3, 3], "video_processor_type": "Molmo2VideoProcessor"}
    text.write_json(path / "video_preprocessor_config.json", clip | own)
    settings = {
        "image_use_col_tokens": True,
        "processor_class": owner,
        "use_frame_special_tokens": True,
        "use_single_crop_col_tokens": None,
        "use_single_crop_start_token": True,
        "video_use_col_tokens": False,
    }
    text.write_json(path / "processor_config.json", settings)


# --- LFM2-VL ---------------------------------------------------------------------------------------------------------

LFM2_MARKS = ("<|startoftext|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
LFM2_MARKS += tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))


def make_lfm2_vl(path: Path) -> None:
    """As LiquidAI/LFM2-VL-450M: short convolutions, an attention layer among them, pictures of their own size."""
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<image>", bos="<|startoftext|>")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    named = {
        "bos_token": "<|startoftext|>",
        "image_end_token": "<|image_end|>",
        "image_start_token": "<|image_start|>",
        "image_thumbnail": "<|img_thumbnail|>",
        "image_token": "<image>",
    }
    ids = qwen_tokens(path, "Lfm2VlProcessor", LFM2_MARKS, named | {"chat_template": form})
    config = {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "downsample_factor": 2,
        "image_token_id": ids["<image>"],
        "model_type": "lfm2_vl",
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 48,
        "text_config": language(
            "lfm2",
            "Lfm2ForCausalLM",
            block_auto_adjust_ff_dim=False,
            block_ff_dim=96,
            conv_L_cache=3,
            conv_bias=False,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
            norm_eps=1e-5,
            num_hidden_layers=5,
            rope_theta=1000000.0,
        ),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "intermediate_size": 64,
            "layer_norm_eps": 1e-6,
            "model_type": "siglip2_vision_model",
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "num_patches": 16,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    own = {"encoder_patch_size": 14, "max_image_tokens": 12, "min_image_tokens": 4, "max_tiles": 4, "min_tiles": 2}
    own |= {"tile_size": 56, "downsample_factor": 2, "do_image_splitting": True, "use_thumbnail": True}
    own |= {"image_mean": tiny.HALF, "image_std": tiny.HALF, "size": {"height": 56, "width": 56}, "resample": 2}
    own |= {"max_num_patches": 48, "max_pixels_tolerance": 2.0}
    text.write_json(path / "preprocessor_config.json", pixels("Lfm2VlImageProcessor", "Lfm2VlProcessor", **own))
    text.write_json(path / "processor_config.json", {"processor_class": "Lfm2VlProcessor"})
    tiny._write_model(
        path,
        config,
        tiny._qwen_generation(ids),
        ids,
        seed=SEEDS["lfm2_vl"],
        keep=("<|im_end|>",),
        adjust=_far_before_near,
    )


def _far_before_near(model: Any) -> None:
    """Attention strong beside the convolutions, lest the last few tokens alone decide the answer."""
    for name, weight in model.named_parameters():
        if name.endswith("conv.out_proj.weight"):
            weight.mul_(0.15)
        elif name.endswith("self_attn.out_proj.weight") and "language_model" in name:
            weight.mul_(3.0)


TINY: dict[str, Callable[[Path], None]] = {
    "hunyuan_vl": make_hunyuan_vl,
    "ernie4_5_vl_moe": make_ernie4_5_vl_moe,
    "llama4": make_llama4,
    "molmo2": make_molmo2,
    "lfm2_vl": make_lfm2_vl,
}
# Families that an older transformers does not have.
ABSENT_FAMILIES = tuple(name for name in ("molmo2",) if find_spec(f"transformers.models.{name}") is None)
for _name in ABSENT_FAMILIES:
    del TINY[_name]
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = tuple(name for name in ("ernie4_5_vl_moe", "molmo2") if name in TINY)
FORMS["hunyuan_vl"] = f"{HUNYUAN_BEGIN}{{}}{HUNYUAN_USER}"
FORMS["ernie4_5_vl_moe"] = "<|begin_of_sentence|>User: {}\nAssistant: "
FORMS["llama4"] = LLAMA4_TURN
FORMS["molmo2"] = CHATML_TURN
FORMS["lfm2_vl"] = "<|startoftext|>" + CHATML_TURN
MARKERS["hunyuan_vl"] = ("".join(HUNYUAN_IMAGE), "")
MARKERS["ernie4_5_vl_moe"] = ERNIE_MARKERS
MARKERS["llama4"] = ("<|image|>", "")
MARKERS["molmo2"] = ("<|image|>", "<|video|>")
MARKERS["lfm2_vl"] = ("<image>", "")
