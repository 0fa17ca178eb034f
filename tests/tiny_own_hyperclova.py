"""A small random checkpoint of HyperCLOVA X SEED Vision; see tiny.py."""

from __future__ import annotations

import copy
from pathlib import Path

from tests import tiny
from tests import tiny_text as text
from tests.oracle.cases import Ask, Clip
from tests.tiny_media import FORMS, MARKERS

SEEDS: dict[str, int] = {"hyperclovax_vlm": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
IMAGE_MARK, VIDEO_MARK = "<|dummy3|>", "<|_unuse_missing_100270|>"
_CHAT = (
    """{%- for message in messages -%}
{%- if loop.first -%}{{- '<|im_start|>tool_list\\n<|im_end|>\\n' -}}{%- endif -%}
{%- if message.content is string -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}
{{- '<|im_start|>' + message.role + '\\n' + part.text + '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + ' (mime)\\n{"filename": "' + part.get('filename', '') + '"}<|im_end|>\\n' -}}
{{- '<|im_start|>' + message.role + ' (vector)\\n' -}}
{{- '"""
    + IMAGE_MARK
    + """' if part.type == 'image' else '"""
    + VIDEO_MARK
    + """' -}}
{{- '<|im_end|>\\n<|im_start|>image/aux\\n{"ocr": "' + part.get('ocr', '') -}}
{{- '", "lens_keywords": "' + part.get('lens_keywords', '') -}}
{{- '", "lens_local_keywords": "' + part.get('lens_local_keywords', '') + '"}<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
)
_NAMES = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_model.": "vision_model.vision_model.",
    "model.mm_projector.": "mm_projector.",
    "model.image_newline": "image_newline",
}
_TILE = 42


def make_hyperclovax_vlm(path: Path) -> None:
    """As naver-hyperclovax/HyperCLOVAX-SEED-Vision-Instruct-3B: SigLIP, an abstractor, Llama; bfloat16.

    A tile has 3 x 3 patches, four embeddings in an image and as a canvas' first frame, and one as any other frame.
    """
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    specials = (*text.QWEN_TEXT_SPECIALS, "<|stop|>", "<|endofturn|>", IMAGE_MARK, VIDEO_MARK)
    settings = {"chat_template": _CHAT, "processor_class": "HCXVisionProcessor", "tokenizer_class": "GPT2Tokenizer"}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    grids = [
        [rows * _TILE, columns * _TILE] for rows in range(1, 10) for columns in range(1, 10) if rows * columns < 10
    ]
    code = {"AutoConfig": "configuration_hyperclovax.HCXVisionConfig"}
    config = {
        "anyres": True,
        "architectures": ["HCXVisionForCausalLM"],
        "auto_map": code | {"AutoModelForCausalLM": "modeling_hyperclovax.HCXVisionForCausalLM"},
        "decoder_max_length": 16384,
        "first_last_frames_slow": False,
        "freeze_decoder": False,
        "freeze_encoder": True,
        "freeze_mm_projector": False,
        "hidden_size": 128,
        "ignore_index": -100,
        "image_token_id": ids[IMAGE_MARK],
        "img_start_id": ids[IMAGE_MARK],
        "max_num_grids": 9,
        "mm_projector_type": "cabstractor",
        "model_type": "hyperclovax_vlm",
        "num_queries_vis_abstractor_image": 4,
        "num_queries_vis_abstractor_video_fast": 1,
        "num_queries_vis_abstractor_video_slow": 4,
        "possible_resolutions": grids,
        "proj_pos_emb": True,
        "proj_prenorm": False,
        "text_config": tiny.LLAMA_SHAPE
        | {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|endofturn|>"],
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 128,
            "max_position_embeddings": 4096,
            "mlp_bias": False,
            "model_type": "llama",
            "pad_token_id": ids["<|endoftext|>"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        "torch_dtype": "bfloat16",
        "unpad": True,
        "use_1x1_grid": True,
        "use_nth_layer": -2,
        "video_token_id": ids[VIDEO_MARK],
        "vision_config": {
            "hidden_size": 32,
            "image_size": _TILE,
            "intermediate_size": 64,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    config = tiny._reshape.get()(config)
    package = registry.find("hyperclovax_vlm", ("HCXVisionForCausalLM",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS["hyperclovax_vlm"])
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = registry.own_class(package, "model")._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[*(ids[token] for token in specials if token != "<|im_end|>"), *range(len(ids), len(head))]] *= 0.05
    weights = {}
    for name, weight in model.state_dict().items():
        ours = next(prefix for prefix in _NAMES if name.startswith(prefix))
        if not (ours == "lm_head." and config["text_config"]["tie_word_embeddings"]):
            weights[_NAMES[ours] + name.removeprefix(ours)] = weight.detach().to(torch.bfloat16).contiguous()
    # Published, and unused: the tower's last layer and the norm after it.
    last = len(model.model.vision_model.encoder.layers)
    for name, weight in list(weights.items()):
        before, is_last, after = name.partition(f".encoder.layers.{last - 1}.")
        if is_last:
            weights[f"{before}.encoder.layers.{last}.{after}"] = weight.clone()
    for name in ("weight", "bias"):
        weights[f"vision_model.vision_model.post_layernorm.{name}"] = torch.ones(32, dtype=torch.bfloat16)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    generation = {"eos_token_id": [ids["<|endofturn|>"], ids["<|stop|>"]], "pad_token_id": ids["<|endoftext|>"]}
    text.write_json(path / "generation_config.json", generation | {"bos_token_id": ids["<|endoftext|>"]})
    pixels = {
        "anyres": True,
        "auto_map": {
            "AutoImageProcessor": "image_processing_hyperclovax.HCXVisionImageProcessor",
            "AutoProcessor": "processing_hyperclovax.HCXVisionProcessor",
        },
        "crop_size": {"height": _TILE, "width": _TILE},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "first_last_frames_slow_video": False,
        "image_mean": tiny.HALF,
        "image_processor_type": "HCXVisionImageProcessor",
        "image_std": tiny.HALF,
        "num_queries_vis_abstractor_image": 4,
        "num_queries_vis_abstractor_video_fast": 1,
        "num_queries_vis_abstractor_video_slow": 4,
        "pad_to_square": True,
        "patch_size": 14,
        "possible_resolutions": grids,
        "processor_class": "HCXVisionProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": _TILE},
        "unpad": True,
    }
    text.write_json(path / "preprocessor_config.json", pixels)


TINY = {"hyperclovax_vlm": make_hyperclovax_vlm}
IMAGE_FAMILIES = ("hyperclovax_vlm",)
VIDEO_FAMILIES = ("hyperclovax_vlm",)
FORMS["hyperclovax_vlm"] = "<|im_start|>tool_list\n<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MARKERS["hyperclovax_vlm"] = (IMAGE_MARK, VIDEO_MARK)
REFERENCE_ASKS = {
    "hyperclovax_vlm": {
        "full_canvas": Ask("{v}What moves?", videos=(Clip(9, 6),)),
        "canvas_and_rest": Ask("{v}What moves?", videos=(Clip(13, 7),)),
        "two_videos": Ask("{v}or {v}?", videos=(Clip(11, 10), Clip(3, 11))),
        "strip": Ask("{i}Read it.", ((400, 31, 14),)),
    }
}
"""Videos on several canvases, and an image whose padding is most of its grid."""
