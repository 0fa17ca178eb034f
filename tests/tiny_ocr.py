"""Small random checkpoints of families that read pages: GLM-OCR.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import tiny
from tests.tiny_grid import GLM_MARKERS, GLM_MARKS, GLM_TURN, grid_pixels
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import chat, language, qwen_tokens

SEEDS: dict[str, int] = {"glm_ocr": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""


def make_glm_ocr(path: Path) -> None:
    """As zai-org/GLM-OCR: GLM-4V's text with wider heads; a tower with norms of q and k, without learned positions."""
    form = chat("<|%role%|>\\n", "", *GLM_MARKERS, bos="[gMASK]<sop>")
    form += "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
    ids = qwen_tokens(path, "Glm46VProcessor", GLM_MARKS, {"chat_template": form})
    rope = {"mrope_section": [4, 4, 4], "partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"}
    config = {
        "architectures": ["GlmOcrForConditionalGeneration"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_token_id": ids["<|image|>"],
        "model_type": "glm_ocr",
        "text_config": language(
            "glm_ocr_text",
            "GlmOcrForConditionalGeneration",
            head_dim=24,
            num_nextn_predict_layers=1,
            rope_parameters=rope,
        ),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "video_end_token_id": ids["<|end_of_video|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_token_id": ids["<|video|>"],
        "vision_config": {
            "attention_bias": True,
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 32,
            "image_size": 84,
            "in_channels": 3,
            "intermediate_size": 48,
            "model_type": "glm_ocr_vision",
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    grid_pixels(path, "Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", 14)
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["glm_ocr"], keep=("<|im_end|>",))


TINY: dict[str, Callable[[Path], None]] = {"glm_ocr": make_glm_ocr}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("glm_ocr",)
FORMS["glm_ocr"] = GLM_TURN
MARKERS["glm_ocr"] = GLM_MARKERS
