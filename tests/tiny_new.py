"""Small random checkpoints of newer families, each with something of its own in its layers or its positions.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import chat, pixels, qwen_tokens

SEEDS: dict[str, int] = {
    "hunyuan_vl": 1,
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


TINY: dict[str, Callable[[Path], None]] = {
    "hunyuan_vl": make_hunyuan_vl,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
FORMS["hunyuan_vl"] = f"{HUNYUAN_BEGIN}{{}}{HUNYUAN_USER}"
MARKERS["hunyuan_vl"] = ("".join(HUNYUAN_IMAGE), "")
