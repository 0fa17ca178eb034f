"""Small random checkpoints of MiniCPM-V and MiniCPM-o, laid out as the ones that the functions name; see tiny.py."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.oracle.cases import Ask
from tests.tiny_media import FORMS, MARKERS, SOUND_MARKERS
from tests.tiny_sound import EARS, whisper_features

SEEDS: dict[str, int] = {"minicpmv": 1, "minicpmo": 2}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
MARKS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
AUDIO_MARKS = ("<|audio_start|>", "<|audio_end|>")
_NAMES = {"lm_head.": "llm.lm_head.", "model.language_model.": "llm.model.", "model.vpm.": "vpm."}
_NAMES |= {f"model.{part}.": f"{part}." for part in ("resampler", "apm", "audio_projection_layer")}


def make_minicpmv(path: Path) -> None:
    """As openbmb/MiniCPM-V-2_6: slices that queries ask, and Qwen 2 under `llm.`."""
    _make(path, "minicpmv", "MiniCPMV")


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
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    specials = (*text.QWEN_TEXT_SPECIALS, *MARKS, *further)
    settings = {"chat_template": text.QWEN_TEXT_CHAT, "unk_token": "<unk>"}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    config = tiny.LLAMA_SHAPE | {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_minicpm.MiniCPMVConfig",
            "AutoModel": "modeling_minicpmv.MiniCPMV",
            "AutoModelForCausalLM": "modeling_minicpmv.MiniCPMV",
        },
        "batch_vision_input": True,
        "bos_token_id": ids["<|endoftext|>"],
        "drop_vision_last_layer": False,
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": 128,
        "image_size": 56,
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": name,
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
        "vision_config": {
            "hidden_size": 32,
            "image_size": 98,
            "intermediate_size": 64,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": 14,
        },
    }
    config = {key: value for key, value in config.items() if key != "head_dim"} | (more or {})
    config = tiny._reshape.get()(config)
    package = registry.find(name, (architecture,))
    with torch.random.fork_rng():
        torch.manual_seed(SEEDS[name])
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = registry.own_class(package, "model")._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[*(ids[token] for token in specials if token != "<|im_end|>"), *range(len(ids), len(head))]] *= 0.05
    weights = {}
    for key, weight in model.state_dict().items():
        ours = next(prefix for prefix in _NAMES if key.startswith(prefix))
        weights[_NAMES[ours] + key.removeprefix(ours)] = weight.detach().to(torch.bfloat16).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    text.write_json(path / "generation_config.json", tiny._qwen_generation(ids))
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
        "version": 2.6,
    }
    text.write_json(path / "preprocessor_config.json", pixels)


TINY = {"minicpmv": make_minicpmv, "minicpmo": make_minicpmo}
IMAGE_FAMILIES = VIDEO_FAMILIES = CHATLESS_FAMILIES = tuple(TINY)
"""Their templates are the tokenizers' and take text alone."""
SOUND_FAMILIES = ("minicpmo",)
FORMS |= dict.fromkeys(TINY, "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n")
MARKERS |= dict.fromkeys(TINY, ("(<image>./</image>)\n", "(<video>./</video>)\n"))
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
