"""Small random checkpoints of families that read pages: GLM-OCR, GOT-OCR 2.0, LightOnOCR, PaddleOCR-VL.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import tiny
from tests import tiny_text as text
from tests.tiny_grid import GLM_MARKERS, GLM_MARKS, GLM_TURN, grid_pixels
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import PIXTRAL, chat, language, pixels, qwen_tokens

SEEDS: dict[str, int] = {"glm_ocr": 1, "got_ocr2": 1, "lighton_ocr": 3, "paddleocr_vl": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""


GOT_MARKS = ("<img>", "<imgpad>", "</img>")


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


def make_got_ocr2(path: Path) -> None:
    """As stepfun-ai/GOT-OCR-2.0-hf: SAM's tower with windows and relative positions, Qwen2's text, no chat template.

    A tile has 4 x 4 embeddings where the real one has 16 x 16; the processor takes their number from the tokenizer.
    """
    owner = "GotOcr2Processor"
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *GOT_MARKS)
    settings = {"processor_class": owner, "num_image_tokens": 16}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    config = {
        "architectures": ["GotOcr2ForConditionalGeneration"],
        "image_seq_length": 16,
        "image_token_index": ids["<imgpad>"],
        "model_type": "got_ocr2",
        "pad_token_id": ids["<|endoftext|>"],
        "text_config": language("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "global_attn_indexes": [1],
            "hidden_size": 32,
            "image_size": 64,
            "mlp_dim": 48,
            "model_type": "got_ocr2_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "output_channels": 24,
            "patch_size": 4,
            "window_size": 6,
        },
    }
    size = {"size": {"height": 64, "width": 64}, "crop_to_patches": False, "max_patches": 4, "min_patches": 1}
    text.write_json(path / "preprocessor_config.json", pixels("GotOcr2ImageProcessor", owner, **size))
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["got_ocr2"], keep=("<|im_end|>",))


def make_lighton_ocr(path: Path) -> None:
    """As lightonai/LightOnOCR-1B-1025: Pixtral's tower without breaks, four patches to one embedding, Qwen3's text."""
    marks = ("<|vision_pad|>", "<|vision_end|>", "<|image_pad|>")
    named = dict(zip(("image_break_token", "image_end_token", "image_token"), marks, strict=True))
    form = chat("<|im_start|>%role%\\n", "<|im_end|>\\n", "<|image_pad|>")
    form += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    ids = qwen_tokens(path, "LightOnOcrProcessor", marks, named | {"chat_template": form})
    config = {
        "architectures": ["LightOnOcrForConditionalGeneration"],
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": "lighton_ocr",
        "spatial_merge_size": 2,
        "text_config": language("qwen3", "Qwen3ForCausalLM", head_dim=24, sliding_window=None),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": PIXTRAL,
    }
    size = {"size": {"longest_edge": 112}, "patch_size": {"height": 28, "width": 28}}
    text.write_json(path / "preprocessor_config.json", pixels("PixtralImageProcessor", "LightOnOcrProcessor", **size))
    settings = {"patch_size": 14, "processor_class": "LightOnOcrProcessor", "spatial_merge_size": 2}
    text.write_json(path / "processor_config.json", settings)
    tiny._write_model(path, config, tiny._qwen_generation(ids), ids, seed=SEEDS["lighton_ocr"], keep=("<|im_end|>",))


PADDLE_MARKS = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>")


def make_paddleocr_vl(path: Path) -> None:
    """As PaddlePaddle/PaddleOCR-VL: a flat configuration, SigLIP's tower with rotary positions, ERNIE 4.5's text."""
    form = chat("%role%: ", "\\n", "".join(PADDLE_MARKS), bos="<s>")
    form += "{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"
    (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    named = {"image_token": PADDLE_MARKS[1], "pad_token": "<pad>", "processor_class": "PaddleOCRVLProcessor"}
    ids = text.write_llama_tokenizer(path, ("<pad>", *PADDLE_MARKS), named)
    config = language("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", head_dim=24) | {
        "hidden_act": "silu",
        "image_token_id": ids[PADDLE_MARKS[1]],
        "rope_scaling": {"mrope_section": [4, 4, 4], "rope_type": "default", "type": "default"},
        "tie_word_embeddings": False,
        "use_bias": False,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "image_size": 84,
            "intermediate_size": 48,
            "layer_norm_eps": 1e-6,
            "model_type": "paddleocr_vl",
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        "vision_end_token_id": ids[PADDLE_MARKS[2]],
        "vision_start_token_id": ids[PADDLE_MARKS[0]],
    }
    own = {"merge_size": 2, "min_pixels": 4 * 28 * 28, "max_pixels": 32 * 28 * 28, "patch_size": 14}
    shared = pixels("PaddleOCRVLImageProcessor", "PaddleOCRVLProcessor", temporal_patch_size=1, **own)
    text.write_json(path / "preprocessor_config.json", shared)
    tiny._write_model(path, config, tiny._llama_generation(ids), ids, seed=SEEDS["paddleocr_vl"])


TINY: dict[str, Callable[[Path], None]] = {
    "glm_ocr": make_glm_ocr,
    "got_ocr2": make_got_ocr2,
    "lighton_ocr": make_lighton_ocr,
    "paddleocr_vl": make_paddleocr_vl,
}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES = ("glm_ocr",)
FORMS["glm_ocr"] = GLM_TURN
MARKERS["glm_ocr"] = GLM_MARKERS
FORMS["got_ocr2"] = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in detail.<|im_end|>"
    "<|im_start|>user\n{}<|im_end|><|im_start|>assistant\n"
)
MARKERS["got_ocr2"] = ("".join(GOT_MARKS) + "\n", "")
FORMS["lighton_ocr"] = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MARKERS["lighton_ocr"] = ("<|image_pad|>", "")
FORMS["paddleocr_vl"] = "User: {}\nAssistant: "
MARKERS["paddleocr_vl"] = ("".join(PADDLE_MARKS), "")
