"""Tiny checkpoints in the layouts of repositories that bring their own code, where transformers has another.

Phi-4's stands in tiny_adapted.py, Florence-2's in tiny_cross.py.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests import tiny, tiny_cross
from tests import tiny_text as text

# The main branch's tokens behind the pieces of its vocabulary; the last one stands in no file of it.
ERNIE_ADDED = ("<|IMAGE_PLACEHOLDER|>", "<|AUDIO_PLACEHOLDER|>", "<|LOC_0|>", "<|IMAGE_START|>", "<|IMAGE_END|>")
ERNIE_ADDED += ("<|VIDEO_START|>", "<|VIDEO_END|>", "<|VIDEO_PLACEHOLDER|>")
ERNIE_CONTROL = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<mask:1>", "<mask:7>")


def make_main_ernie(path: Path) -> None:
    """The tiny ERNIE as the main branch of baidu/ERNIE-4.5-VL-28B-A3B-PT, in the folder `path`: files for code of its
    own, with a sentencepiece tokenizer, one processor's settings, and neither a font nor those of videos.

    The names of its weights are that branch's already: transformers writes them as it found them.
    """
    source = tiny.checkpoint("ernie4_5_vl_moe")
    for file in (*source.glob("*.safetensors"), source / "generation_config.json"):
        shutil.copy(file, path)
    native = json.loads((source / "config.json").read_text(encoding="utf-8"))
    ids = _ernie_tokens(path, (source / "chat_template.jinja").read_text(encoding="utf-8"))
    names = ("image", "image_start", "image_end", "video", "video_start", "video_end")
    marks = ("<|IMAGE_PLACEHOLDER|>", *ERNIE_ADDED[3:5], "<|VIDEO_PLACEHOLDER|>", *ERNIE_ADDED[5:7])
    native |= {f"{name}_token_id": ids[mark] for name, mark in zip(names, marks, strict=True)}
    text.write_json(path / "config.json", main_branch(native))
    pictures = json.loads((source / "preprocessor_config.json").read_text(encoding="utf-8"))
    videos = json.loads((source / "video_preprocessor_config.json").read_text(encoding="utf-8"))
    owner, kept = "processing_ernie4_5_vl.Ernie4_5_VL", ("image_mean", "image_std", "merge_size", "patch_size")
    settings = {name: pictures[name] for name in kept if name in pictures} | {
        "auto_map": {"AutoImageProcessor": f"{owner}ImageProcessor", "AutoProcessor": f"{owner}Processor"},
        "image_processor_type": "Ernie4_5_VLImageProcessor",
        "processor_class": "Ernie4_5_VLProcessor",
        "min_pixels": pictures["size"]["shortest_edge"],
        "max_pixels": pictures["size"]["longest_edge"],
        # Real checkpoints leave these to the code, whose videos are too large for tests.
        "video_min_pixels": videos["size"]["shortest_edge"],
        "video_max_pixels": videos["size"]["longest_edge"],
        "video_min_frames": videos["min_frames"],
    }
    text.write_json(path / "preprocessor_config.json", settings)


def _ernie_tokens(path: Path, template: str) -> dict[str, int]:
    """The main branch's tokenizer files, trained on the corpus; the ids of the tokens behind its pieces."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text.CORPUS * 4),
        model_writer=written,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        control_symbols=list(ERNIE_CONTROL),
        user_defined_symbols=[str(digit) for digit in range(10)],
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(written.getvalue())
    for known, spelled in (("IMAGE_PLACEHOLDER", "image@placeholder"), ("VIDEO_PLACEHOLDER", "video@placeholder")):
        template = template.replace(known, spelled)
    settings = {
        "additional_special_tokens": list(ERNIE_ADDED[:-1]),
        "auto_map": {"AutoTokenizer": ["processing_ernie4_5_vl.Ernie4_5_VLTokenizer", None]},
        "bos_token": "<s>",
        "chat_template": template,
        "cls_token": "<|begin_of_sentence|>",
        "eos_token": "</s>",
        "mask_token": "<mask:1>",
        "pad_token": "<unk>",
        "sep_token": "<|end_of_sentence|>",
        "tokenizer_class": "Ernie4_5_VLTokenizer",
        "unk_token": "<unk>",
    }
    text.write_json(path / "tokenizer_config.json", settings)
    return {token: 480 + place for place, token in enumerate(ERNIE_ADDED)}


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
