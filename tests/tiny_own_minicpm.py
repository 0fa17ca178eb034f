"""Small random checkpoints of MiniCPM-V and MiniCPM-o, laid out as the ones that the functions name; see tiny.py."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.oracle.cases import Ask
from tests.tiny_media import FORMS, MARKERS, SOUND_MARKERS
from tests.tiny_sound import EARS, whisper_features

SEEDS: dict[str, int] = {
    "minicpmv": 1,
    "minicpmo": 2,
    "minicpmv_2_0": 1,
    "minicpmv_2_5": 2,
    "minicpmv_4_0": 1,
    "minicpmv_4_5": 1,
}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
MARKS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
AUDIO_MARKS = ("<|audio_start|>", "<|audio_end|>")
LLAMA3_MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_NAMES = {"lm_head.": "llm.lm_head.", "model.language_model.": "llm.model.", "model.vpm.": "vpm."}
_NAMES |= {f"model.{part}.": f"{part}." for part in ("resampler", "apm", "audio_projection_layer")}


EYES = {
    "hidden_size": 32,
    "image_size": 98,
    "intermediate_size": 64,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "patch_size": 14,
}
LLAMA3_CHAT = (
    "{% for message in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def make_minicpmv(path: Path) -> None:
    """As openbmb/MiniCPM-V-2_6: slices that queries ask, and Qwen 2 under `llm.`."""
    _make(path, "minicpmv", "MiniCPMV")


def make_minicpmv_2_0(path: Path) -> None:
    """As openbmb/MiniCPM-V-2: no version, MiniCPM's factors, and another library's names in the tower."""
    marks = ("<image>", "</image>", "<slice>", "</slice>")
    ids = text.write_llama_tokenizer(path, marks, {"unk_token": "<unk>"})
    config = {
        "bos_token_id": 1,
        "dim_model_base": 32,
        "drop_vision_last_layer": True,
        "eos_token_id": 2,
        "num_key_value_heads": 4,
        "scale_depth": 1.4,
        "scale_emb": 12,
        "vision_encoder": "vit_so400m_patch14_siglip_384.webli",
        "vision_config": EYES | {"image_size": 70, "hidden_act": "gelu", "num_hidden_layers": 3},
    }
    left = ("version", "use_image_id", "slice_config", "batch_vision_input", "vision_batch_size")
    _write(path, "minicpmv_2_0", ids, ("<unk>", *marks), config, left)


def make_minicpmv_2_5(path: Path) -> None:
    """As openbmb/MiniCPM-Llama3-V-2_5: Llama 3, whose tokenizer begins every text."""
    marks = ("<unk>", "<image>", "</image>", "<slice>", "</slice>")
    named = {"bos_token": LLAMA3_MARKS[0], "eos_token": LLAMA3_MARKS[1], "unk_token": "<unk>", "pad_token": "!"}
    settings = named | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": LLAMA3_CHAT}
    ids = text.write_llama3_tokenizer(path, (*LLAMA3_MARKS, *marks), "<|reserved|>", tiny.VOCAB - 1, settings)
    config = {
        "bos_token_id": ids[LLAMA3_MARKS[0]],
        "eos_token_id": ids[LLAMA3_MARKS[1]],
        "rope_theta": 500000.0,
        "version": "2.5",
        "vision_config": EYES | {"model_type": "idefics2"},
    }
    quiet = (*marks, *LLAMA3_MARKS, *(token for token in ids if token.startswith("<|reserved")))
    _write(path, "minicpmv_2_5", ids, quiet, config, ("use_image_id", "vision_batch_size"))


def make_minicpmv_4_0(path: Path) -> None:
    """As openbmb/MiniCPM-V-4: 2.6's layout with Llama."""
    _make(path, "minicpmv_4_0", "MiniCPMV", {"version": 4.0, "rope_theta": 10000.0})


def make_minicpmv_4_5(path: Path) -> None:
    """As openbmb/MiniCPM-V-4_5: 2.6's layout with Qwen 3."""
    _make(path, "minicpmv_4_5", "MiniCPMV", {"version": 4.5, "head_dim": 64, "attention_bias": False})


def make_minicpmo(path: Path) -> None:
    """As openbmb/MiniCPM-o-2_6: the same, Whisper's encoder, and weights of what speaks."""
    import torch
    from safetensors.torch import load_file, save_file

    ears = EARS | {"encoder_ffn_dim": 128, "max_source_positions": 1500, "model_type": "whisper", "vocab_size": 51865}
    config = {"audio_chunk_length": 1.0, "audio_config": ears, "audio_pool_step": 2, "chunk_input": True}
    config |= {"init_audio": True, "init_tts": True, "init_vision": True, "stream_input": True, "tts_config": {}}
    _make(path, "minicpmo", "MiniCPMO", config, AUDIO_MARKS)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"tts.projector.linear1.bias": torch.ones(8)}, file, metadata={"format": "pt"})
    pixels = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
    whole = {"chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000}
    text.write_json(path / "preprocessor_config.json", whisper_features("MiniCPMOProcessor", **whole) | pixels)


def _make(
    path: Path, name: str, architecture: str, more: dict[str, Any] | None = None, further: tuple[str, ...] = ()
) -> None:
    specials = (*text.QWEN_TEXT_SPECIALS, *MARKS, *further)
    settings = {"chat_template": text.QWEN_TEXT_CHAT, "unk_token": "<unk>"}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    quiet = tuple(token for token in specials if token != "<|im_end|>")
    _write(path, name, ids, quiet, ends | (more or {}), architecture=architecture)
    text.write_json(path / "generation_config.json", tiny._qwen_generation(ids))


def _write(
    path: Path,
    name: str,
    ids: dict[str, int],
    quiet: tuple[str, ...],
    more: dict[str, Any],
    left: tuple[str, ...] = (),
    architecture: str = "MiniCPMV",
) -> None:
    """config.json, preprocessor_config.json and weights; config.json has the entries `more` and lacks `left`."""
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    config: dict[str, Any] = tiny.LLAMA_SHAPE | {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_minicpm.MiniCPMVConfig",
            "AutoModel": "modeling_minicpmv.MiniCPMV",
            "AutoModelForCausalLM": "modeling_minicpmv.MiniCPMV",
        },
        "batch_vision_input": True,
        "drop_vision_last_layer": False,
        "hidden_act": "silu",
        "hidden_size": 128,
        "image_size": 56,
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": name if name == "minicpmo" else "minicpmv",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "patch_size": 14,
        "query_num": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "slice_config": {"max_slice_nums": 4, "model_type": "minicpmv", "patch_size": 14},
        "slice_mode": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_image_id": True,
        "use_sliding_window": False,
        "version": 2.6,
        "vision_batch_size": 16,
        "vision_config": EYES,
    }
    config = {key: value for key, value in config.items() if key != "head_dim"} | more
    config = {key: value for key, value in config.items() if key not in left}
    config = tiny._reshape.get()(config)
    package = registry.find(config["model_type"], (architecture,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[name])
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = registry.own_class(package, "model")._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[*(ids[token] for token in quiet), *range(len(ids), len(head))]] *= 0.05
    weights = {}
    for key, weight in model.state_dict().items():
        ours = next(prefix for prefix in _NAMES if key.startswith(prefix))
        weights[_NAMES[ours] + key.removeprefix(ours)] = weight.detach().to(torch.bfloat16).contiguous()
    if "scale_depth" in config:
        weights = _first_names(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    named = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    text.write_json(path / "generation_config.json", {"_from_model_config": True, **named})
    pixels = {
        "auto_map": {
            "AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor",
            "AutoProcessor": "processing_minicpmv.MiniCPMVProcessor",
        },
        "im_end": "</image>",
        "im_end_token": "</image>",
        "im_id_end": "</image_id>",
        "im_id_start": "<image_id>",
        "im_start": "<image>",
        "im_start_token": "<image>",
        "image_feature_size": 4,
        "image_processor_type": "MiniCPMVImageProcessor",
        "max_slice_nums": 4,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "patch_size": 14,
        "processor_class": "MiniCPMVProcessor",
        "scale_resolution": 56,
        "slice_end": "</slice>",
        "slice_mode": True,
        "slice_start": "<slice>",
        "unk": "<unk>",
        "use_image_id": True,
        "version": float(config.get("version", 2.0)),
    }
    pixels = {key: value for key, value in pixels.items() if key not in left}
    text.write_json(path / "preprocessor_config.json", pixels)


_FIRST_NAMES = (
    (r"^vpm\.embeddings\.patch_embedding\.", "vpm.patch_embed.proj."),
    (r"^vpm\.embeddings\.position_embedding\.weight$", "vpm.pos_embed"),
    (r"^vpm\.post_layernorm\.", "vpm.norm."),
    (r"^vpm\.encoder\.layers\.", "vpm.blocks."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
)


def _first_names(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under the names of version 2.0."""
    import torch

    made: dict[str, Any] = {}
    for name, weight in weights.items():
        if name.startswith("vpm."):
            for pattern, published in _FIRST_NAMES:
                name = re.sub(pattern, published, name)
        made[name] = weight[None].contiguous() if name == "vpm.pos_embed" else weight
    for name in [name for name in made if name.startswith("vpm.") and ".q_proj." in name]:
        parts = [made.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        made[name.replace(".self_attn.q_proj.", ".attn.qkv.")] = torch.cat(parts)
    return made


TINY: dict[str, Callable[[Path], None]] = {
    "minicpmv": make_minicpmv,
    "minicpmo": make_minicpmo,
    "minicpmv_2_0": make_minicpmv_2_0,
    "minicpmv_2_5": make_minicpmv_2_5,
    "minicpmv_4_0": make_minicpmv_4_0,
    "minicpmv_4_5": make_minicpmv_4_5,
}
VISION = tuple(name for name in TINY if name != "minicpmo")
IMAGE_FAMILIES = CHATLESS_FAMILIES = tuple(TINY)
"""Their templates are the tokenizers' and take text alone."""
VIDEO_FAMILIES = ("minicpmv", "minicpmo", "minicpmv_4_0", "minicpmv_4_5")
SOUND_FAMILIES = ("minicpmo",)
FORMS |= dict.fromkeys(TINY, "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
FORMS["minicpmv_2_0"] = "<用户>{}<AI>"
FORMS["minicpmv_2_5"] = (
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
MARKERS |= dict.fromkeys(TINY, ("(<image>./</image>)\n", "(<video>./</video>)\n"))
MARKERS["minicpmv_2_0"] = ("(<image>./</image>)", "")
# The published processor takes the audio of a prompt together, and its encoder fills all up to the longest.
REFERENCE_ASKS = {
    "minicpmo": {
        "sounds": Ask("A sound {a} and another {a} then {a} are they alike?", sounds=((0.53, 3), (0.53, 4), (0.53, 3))),
        "image_and_sound": Ask("{i}{a}Who is that?", ((84, 56, 1),), sounds=((0.53, 3),)),
        "odd_sound": Ask("{a}What?", sounds=((1.3337, 8),)),
        "two_windows": Ask("{a}Sum up", sounds=((30.5, 9),)),
    }
}
SOUND_MARKERS["minicpmo"] = "(<audio>./</audio>)\n"
