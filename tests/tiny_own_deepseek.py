"""Small random checkpoints of DeepSeek-VL2 and DeepSeek-OCR; see tiny.py for what such checkpoints have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny_text as text
from tests.oracle.cases import Ask
from tests.tiny_media import FORMS
from tests.tiny_own_clip import write_model

SEEDS: dict[str, int] = {"deepseek_vl_v2": 1, "deepseek_vl_v2_small": 2, "deepseek_ocr": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKS = (BEGIN, END, PAD, "<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")
TURNS = ("<|User|>", "<|Assistant|>")
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


def language(ids: dict[str, int]) -> dict[str, Any]:
    """The entry `language_config`: three layers, the last two with eight experts of which three are chosen."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_deepseekv2.DeepseekV2Config",
            "AutoModel": "modeling_deepseek.DeepseekV2Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "first_k_dense_replace": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "kv_lora_rank": None,
        "lm_head": True,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "rm_head": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_mla": False,
        "v_head_dim": 0,
        "vocab_size": -(-len(ids) // 16) * 16,
    }


def processor(resolutions: list[list[int]], patch: int, ratio: int) -> dict[str, Any]:
    """processor_config.json."""
    return {
        "add_special_token": False,
        "candidate_resolutions": resolutions,
        "downsample_ratio": ratio,
        "ignore_id": -100,
        **HALVES,
        "image_token": "<image>",
        "mask_prompt": False,
        "normalize": True,
        "pad_token": PAD,
        "patch_size": patch,
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }


def split_experts(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights with each expert's own matrices, as they are published."""
    made: dict[str, Any] = {}
    for name, weight in weights.items():
        if ".mlp.experts." not in name:
            made[name] = weight
            continue
        stem = name.rpartition(".")[0]
        for number, own in enumerate(weight):
            halves = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True)
            parts = dict(halves) if name.endswith("gate_up_proj") else {"down_proj": own}
            made |= {f"{stem}.{number}.{part}.weight": matrix for part, matrix in parts.items()}
    return made


def fused(weights: dict[str, Any], parts: tuple[str, str, str], whole: str) -> dict[str, Any]:
    """The weights with three parts, named with dots around them, put together."""
    import torch

    made = dict(weights)
    for name in [name for name in made if parts[0] in name and "language_model" not in name]:
        made[name.replace(parts[0], whole)] = torch.cat([made.pop(name.replace(parts[0], part)) for part in parts])
    return made


# --- DeepSeek-VL2 ----------------------------------------------------------------------------------------------------

_VL2_NAMES = (
    (r"^lm_head\.", "language.lm_head."),
    (r"^model\.language_model\.", "language.model."),
    (r"^model\.(image_newline|view_seperator)$", r"\1"),
    (r"^model\.projector\.", "projector."),
    (r"^model\.vision\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^model\.vision\.embeddings\.position_embedding\.weight$", "vision.pos_embed"),
    (r"^model\.vision\.post_layernorm\.", "vision.norm."),
    (r"^model\.vision\.encoder\.layers\.(\d+)\.layer_norm(\d)\.", r"vision.blocks.\1.norm\2."),
    (r"^model\.vision\.encoder\.layers\.(\d+)\.self_attn\.out_proj\.", r"vision.blocks.\1.attn.proj."),
    (r"^model\.vision\.encoder\.layers\.(\d+)\.self_attn\.", r"vision.blocks.\1.attn."),
    (r"^model\.vision\.encoder\.layers\.(\d+)\.mlp\.", r"vision.blocks.\1.mlp."),
)


def make_deepseek_vl_v2(path: Path, name: str = "deepseek_vl_v2", changes: dict[str, Any] | None = None) -> None:
    """As deepseek-ai/deepseek-vl2-tiny: no class is named, the tower in timm's layout with an unused head.

    Args:
        name: the checkpoint's, of SEEDS.
        changes: other entries of `language_config`; "absent" leaves an entry out.
    """
    ids = text.write_deepseek_tokenizer(path, (*MARKS, *TURNS), {"add_bos_token": False})
    spoken = language(ids) | (changes or {})
    sizes = [[42, 42], [42, 84], [84, 42], [42, 126], [126, 42], [84, 84]]
    config = {
        "candidate_resolutions": sizes,
        "global_view_pos": "head",
        "language_config": {key: value for key, value in spoken.items() if value != "absent"},
        "model_type": "deepseek_vl_v2",
        "projector_config": {"input_dim": 32, "model_type": "mlp_projector", "n_embed": 64},
        "tile_tag": "2D",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.38.2",
        "vision_config": {
            "heads": 2,
            "image_size": 42,
            "layers": 3,
            "mlp_ratio": 3.7362,
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "patch_size": 14,
            "width": 32,
        },
    }
    generation = {"_from_model_config": True, "bos_token_id": ids[BEGIN], "eos_token_id": ids[END]}
    quiet = tuple(mark for mark in (*MARKS, *TURNS) if mark != END)
    write_model(path, config, generation, ids, quiet, seed=SEEDS[name], publish=_publish_vl2)
    text.write_json(path / "processor_config.json", processor(sizes, 14, 2))


LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "use_mla": "absent", "v_head_dim": 12}


def make_deepseek_vl_v2_small(path: Path) -> None:
    """As deepseek-ai/deepseek-vl2-small: latent attention, which config.json does not name."""
    make_deepseek_vl_v2(path, "deepseek_vl_v2_small", LATENT)


def _publish_vl2(weights: dict[str, Any]) -> dict[str, Any]:
    import torch

    made: dict[str, Any] = {}
    parts = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
    for name, weight in split_experts(fused(weights, parts, ".self_attn.qkv.")).items():
        new = name
        for pattern, published in _VL2_NAMES:
            new = re.sub(pattern, published, new)
        made[new] = weight
    made["vision.pos_embed"] = made["vision.pos_embed"][None]
    # The pooling of the published tower, which the code never runs.
    made["vision.attn_pool.latent"] = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    return made


# --- DeepSeek-OCR ----------------------------------------------------------------------------------------------------

_OCR_NAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.sam_model\.layers\.(\d+)\.layer_norm(\d)\.", r"model.sam_model.blocks.\1.norm\2."),
    (r"^model\.sam_model\.layers\.", "model.sam_model.blocks."),
    (r"^model\.sam_model\.patch_embed\.projection\.", "model.sam_model.patch_embed.proj."),
    (r"^model\.sam_model\.neck\.conv1\.", "model.sam_model.neck.0."),
    (r"^model\.sam_model\.neck\.layer_norm1\.", "model.sam_model.neck.1."),
    (r"^model\.sam_model\.neck\.conv2\.", "model.sam_model.neck.2."),
    (r"^model\.sam_model\.neck\.layer_norm2\.", "model.sam_model.neck.3."),
    (r"^model\.sam_model\.proj\.conv1\.", "model.sam_model.net_2."),
    (r"^model\.sam_model\.proj\.conv2\.", "model.sam_model.net_3."),
)


def make_deepseek_ocr(path: Path) -> None:
    """As deepseek-ai/DeepSeek-OCR: the text's settings twice, both towers in `width`, CLIP's patches unused."""
    marks = (*MARKS, "<td>", "</td>", "<tr>", "</tr>", *TURNS)
    ids = text.write_deepseek_tokenizer(path, marks, {"add_bos_token": True})
    inner = language(ids) | {"num_key_value_heads": 2}
    config = inner | {
        "_name_or_path": "deepseek-ai/DeepSeek-OCR",
        "architectures": ["DeepseekOCRForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_deepseekocr.DeepseekOCRConfig",
            "AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM",
        },
        "candidate_resolutions": [[192, 192]],
        "global_view_pos": "head",
        "language_config": inner,
        "model_type": "deepseek_vl_v2",
        "projector_config": {
            "input_dim": 64,
            "model_type": "mlp_projector",
            "n_embed": 64,
            "projector_type": "linear",
        },
        "tile_tag": "2D",
        "transformers_version": "4.46.3",
        "vision_config": {
            "image_size": 192,
            "mlp_ratio": 3.7362,
            "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {
                "clip-l-14-224": {"heads": 2, "image_size": 42, "layers": 2, "patch_size": 14, "width": 32},
                "sam_vit_b": {
                    "downsample_channels": [24, 32],
                    "global_attn_indexes": [1],
                    "heads": 2,
                    "layers": 3,
                    # The published code has it as a constant, as the next file's `image_size` and `max_crops`.
                    "output_channels": 16,
                    "width": 32,
                },
            },
        },
    }
    generation = {"_from_model_config": True, "bos_token_id": ids[BEGIN], "eos_token_id": ids[END]}
    quiet = tuple(mark for mark in marks if mark != END)
    write_model(path, config, generation, ids, quiet, seed=SEEDS["deepseek_ocr"], publish=_publish_ocr)
    settings = processor([[192, 192]], 16, 4) | {"image_size": 128, "max_crops": 4}
    text.write_json(path / "processor_config.json", settings)


def _publish_ocr(weights: dict[str, Any]) -> dict[str, Any]:
    import torch

    made: dict[str, Any] = {}
    parts = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
    for name, weight in split_experts(fused(weights, parts, ".self_attn.qkv_proj.")).items():
        new = name
        for pattern, published in _OCR_NAMES:
            new = re.sub(pattern, published, new)
        made[new] = weight
    # The patches of CLIP, in whose place the features of SAM stand.
    made["model.vision_model.embeddings.patch_embedding.weight"] = torch.ones(32, 3, 14, 14, dtype=torch.bfloat16)
    return made


TINY: dict[str, Callable[[Path], None]] = {
    "deepseek_vl_v2": make_deepseek_vl_v2,
    "deepseek_vl_v2_small": make_deepseek_vl_v2_small,
    "deepseek_ocr": make_deepseek_ocr,
}
IMAGE_FAMILIES = tuple(TINY)
# The repositories have no chat template; the families bring one.
CHATLESS_FAMILIES = tuple(TINY)
FORMS["deepseek_ocr"] = "{}"
VL2_FAMILIES = ("deepseek_vl_v2", "deepseek_vl_v2_small")
FORMS |= dict.fromkeys(VL2_FAMILIES, "<|User|>: {}\n\n<|Assistant|>:")
_MANY = ((84, 56, 3), (56, 112, 4), (140, 84, 5))
REFERENCE_ASKS = {
    "deepseek_vl_v2": {
        "three_images": Ask("{i}{i}{i}What is the content of each image?", _MANY, max_tokens=16),
        "grounding": Ask("{i}<|ref|>The square<|/ref|>.", ((140, 84, 5),)),
    },
    "deepseek_vl_v2_small": {"three_images": Ask("{i}{i}{i}What is the content of each image?", _MANY, max_tokens=16)},
}
