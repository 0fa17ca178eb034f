"""Tiny checkpoints in the layouts of repositories that bring their own code, where transformers has another.

Phi-4's stands in tiny_adapted.py, Florence-2's in tiny_cross.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests import tiny, tiny_cross
from tests import tiny_text as text


def make_main_ernie(path: Path) -> None:
    """The tiny ERNIE under the configuration of baidu/ERNIE-4.5-VL-28B-A3B-PT's main branch, in the folder `path`.

    The names of its weights are that branch's already: transformers writes them as it found them.
    """
    shutil.copytree(tiny.checkpoint("ernie4_5_vl_moe"), path, dirs_exist_ok=True)
    native = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text.write_json(path / "config.json", main_branch(native))


def make_florence2(path: Path) -> None:
    """The tiny Florence-2 as microsoft/Florence-2-large."""
    with tempfile.TemporaryDirectory() as tokens:
        tiny_cross.make_microsoft_florence2(path, Path(tokens))


def make_bart(path: Path) -> None:
    """The tokenizer of facebook/bart-large, as that repository has it."""
    with tempfile.TemporaryDirectory() as model:
        tiny_cross.make_microsoft_florence2(Path(model), path)


def main_branch(native: dict[str, Any]) -> dict[str, Any]:
    """The tiny ERNIE's configuration as the main branch of its repository writes one."""
    text, vision = native["text_config"], native["vision_config"]
    kept = (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "moe_intermediate_size",
        "moe_k",
        "moe_num_shared_experts",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "use_bias",
        "vocab_size",
    )
    names = ("image_start", "image_end", "video_start", "video_end", "video")
    return {name: text[name] for name in kept} | {
        "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoEConfig"},
        "freq_allocation": 2,
        "im_patch_id": native["image_token_id"],
        "model_type": "ernie4_5_moe_vl",
        "moe_layer_end_index": [29, 28],
        "moe_layer_interval": 1,
        "moe_layer_start_index": [1, 1],
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "rope_theta": 500000,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {name: vision[name] for name in vision if name != "intermediate_size"} | {"mlp_ratio": 2},
        **{f"{name}_token_id": native[f"{name}_token_id"] for name in names},
    }
