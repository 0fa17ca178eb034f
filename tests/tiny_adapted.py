"""Small random checkpoints of families that bring LoRA adapters of their own; see tiny.py for what they share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS, SOUND_MARKERS

SEEDS = {"phi4_mm": 1}
RANK = 4
LORA_LAYERS = "layers.*((self_attn.(qkv_proj|o_proj))|(mlp.(gate_up|down)_proj))"
LAYERS = 3
# Layer -> its inputs and outputs.
SHAPES = {
    "self_attn.qkv_proj": (64, 128),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_up_proj": (64, 192),
    "mlp.down_proj": (96, 64),
}
PHI_CHAT = """{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type == 'audio' -%}{{- '<|audio|>' -}}
{%- else -%}{{- '<|image|>' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def make_phi4_mm(path: Path) -> None:
    """microsoft/Phi-4-multimodal-instruct as transformers lays it out; adapters in folders of their own."""
    marks = ("<|endoftext|>", "<|image|>", "<|audio|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
    settings = {
        "chat_template": PHI_CHAT,
        "extra_special_tokens": {"image_token": "<|image|>", "audio_token": "<|audio|>"},
        "processor_class": "Phi4MultimodalProcessor",
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    ids = text.write_qwen_tokenizer(path, marks, "<|end|>", settings)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}
    config = {key: value for key, value in tiny.LLAMA_SHAPE.items() if key != "head_dim"} | {
        "architectures": ["Phi4MultimodalForCausalLM"],
        "audio_config": {
            "audio_token_id": ids["<|audio|>"],
            "depthwise_separable_out_channel": 16,
            "ext_pw_out_channel": 16,
            "hidden_size": 16,
            "intermediate_size": 32,
            "model_type": "phi4_multimodal_audio",
            "nemo_conv_channels": 8,
            "num_attention_heads": 2,
            "num_blocks": 2,
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|end|>"],
        "max_position_embeddings": 4096,
        "model_type": "phi4_multimodal",
        "original_max_position_embeddings": 1200,
        "pad_token_id": ids["<|endoftext|>"],
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "longrope", **factors},
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "crop_size": 448,
            "feature_layer": -2,
            "hidden_size": 32,
            "image_size": 448,
            "image_token_id": ids["<|image|>"],
            "intermediate_size": 64,
            "model_type": "phi4_multimodal_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": 14,
        },
    }
    pixels = {
        "dynamic_hd": 6,
        "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
        "image_mean": tiny.HALF,
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "image_std": tiny.HALF,
        "processor_class": "Phi4MultimodalProcessor",
        "size": {"height": 448, "width": 448},
    }
    text.write_json(path / "preprocessor_config.json", pixels)
    text.write_json(path / "chat_template.json", {"chat_template": PHI_CHAT})
    generation = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|end|>"]}
    tiny._write_model(path, config, generation, ids, seed=SEEDS["phi4_mm"], keep=("<|end|>",))
    for number, name in enumerate(("vision-lora", "speech-lora")):
        _write_adapter(path / name, "base_model.model.model.", number)


def _write_adapter(folder: Path, prefix: str, seed: int) -> None:
    """Random matrices on all linear layers, as peft writes them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in SHAPES.items():
            where = f"{prefix}layers.{layer}.{name}.lora_"
            for half, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                tensors[f"{where}{half}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "TBA",
        "bias": "none",
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": r"model.layers.\d+.((self_attn\.(qkv|o)_proj)|(mlp\.(gate_up|down)_proj))",
        "task_type": "CAUSAL_LM",
    }
    text.write_json(folder / "adapter_config.json", config)


# The main revision's template, but for tools: it takes contents that are strings.
PHI_MAIN_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
# Token of the tiny tokenizer -> what the main revision calls it.
PHI_MAIN_MARKS = {"<|image|>": "<|endoftext10|>", "<|audio|>": "<|endoftext11|>"}
# Ends and beginnings of names: transformers' -> the main revision's.
PHI_MAIN_NAMES = {
    "image_embed.img_projection_up.": "image_embed.img_projection.0.",
    "image_embed.img_projection_down.": "image_embed.img_projection.2.",
    "image_embed.global_img_feature_extensor": "image_embed.glb_GN",
    "image_embed.sub_img_feature_extensor": "image_embed.sub_GN",
    "audio_embed.up_proj_for_speech.": "audio_embed.audio_projection.speech.0.",
    "audio_embed.down_proj_for_speech.": "audio_embed.audio_projection.speech.2.",
    "audio_embed.up_proj_for_vision_speech.": "audio_embed.audio_projection.vision.0.",
    "audio_embed.down_proj_for_vision_speech.": "audio_embed.audio_projection.vision.2.",
}
PHI_MAIN_SOUND_NAMES = {
    ".gate_up_proj.": ".net.0.linear.",
    ".down_proj.": ".net.2.",
    ".q_proj.": ".linear_q.",
    ".k_proj.": ".linear_k.",
    ".v_proj.": ".linear_v.",
    ".o_proj.": ".linear_out.",
}


def make_main_phi4_mm(path: Path) -> None:
    """The tiny phi4_mm in the layout of microsoft/Phi-4-multimodal-instruct's main revision, without its code.

    Weights, adapters and ids are the same; names, configuration and files are the repository's.
    """
    from safetensors.torch import load_file, save_file

    native = tiny.checkpoint("phi4_mm")
    weights = {main_name(name): weight for name, weight in load_file(native / "model.safetensors").items()}
    for kind in ("vision", "speech"):
        shutil.copytree(native / f"{kind}-lora", path / f"{kind}-lora")
        for name, weight in load_file(native / f"{kind}-lora" / "adapter_model.safetensors").items():
            weights[name.removeprefix("base_model.model.").replace(".weight", f".{kind}.weight")] = weight
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "special_tokens_map.json", "tokenizer_config.json"):
        said = (native / file).read_text(encoding="utf-8")
        for ours, theirs in PHI_MAIN_MARKS.items():
            said = said.replace(ours, theirs)
        (path / file).write_text(said, encoding="utf-8")
    for file in ("vocab.json", "merges.txt", "generation_config.json"):
        shutil.copy(native / file, path)
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("extra_special_tokens", "processor_class", "image_token", "audio_token"):
        settings.pop(name, None)
    text.write_json(path / "tokenizer_config.json", settings | {"chat_template": PHI_MAIN_CHAT})
    config = json.loads((native / "config.json").read_text(encoding="utf-8"))
    text.write_json(path / "config.json", _main_config(config))
    code = "processing_phi4mm.Phi4MM"
    pixels = {
        "audio_compression_rate": 8,
        "audio_downsample_rate": 1,
        "audio_feat_stride": 1,
        "auto_map": {
            "AutoFeatureExtractor": f"{code}AudioFeatureExtractor",
            "AutoImageProcessor": f"{code}ImageProcessor",
            "AutoProcessor": f"{code}Processor",
        },
        "dynamic_hd": 6,
        "feature_extractor_type": "Phi4MMAudioFeatureExtractor",
        "image_processor_type": "Phi4MMImageProcessor",
        "processor_class": "Phi4MMProcessor",
    }
    text.write_json(path / "preprocessor_config.json", pixels)
    text.write_json(path / "processor_config.json", {"processor_class": "Phi4MMProcessor"})


def _main_config(native: dict[str, Any]) -> dict[str, Any]:
    sound, sight = native["audio_config"], native["vision_config"]
    apart = ("architectures", "audio_config", "model_type", "vision_config")
    return {name: value for name, value in native.items() if name not in apart} | {
        "_attn_implementation": "flash_attention_2",
        "architectures": ["Phi4MMForCausalLM"],
        "attention_bias": False,
        "audio_config": {"audio_token_id": sound["audio_token_id"]},
        "audio_processor": {
            "config": {
                "activation": "swish",
                "attention_dim": sound["hidden_size"],
                "attention_heads": sound["num_attention_heads"],
                "bias_in_glu": True,
                "causal": True,
                "cnn_layer_norm": True,
                "depthwise_seperable_out_channel": sound["depthwise_separable_out_channel"],
                "encoder_embedding_config": {"input_size": 80},
                "ext_pw_kernel_size": 1,
                "ext_pw_out_channel": sound["ext_pw_out_channel"],
                "input_layer": "nemo_conv",
                "linear_units": sound["intermediate_size"],
                "nemo_conv_settings": {"conv_channels": sound["nemo_conv_channels"]},
                "num_blocks": sound["num_blocks"],
                "relative_attention_bias_args": {"t5_bias_max_distance": 1000, "type": "t5"},
                "time_reduction": 8,
            },
            "name": "cascades",
        },
        "auto_map": {
            "AutoConfig": "configuration_phi4mm.Phi4MMConfig",
            "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "embd_layer": {
            "audio_embd_layer": {
                "compression_rate": 8,
                "downsample_rate": 1,
                "embedding_cls": "audio",
                "projection_cls": "mlp",
                "use_conv_downsample": False,
                "use_qformer": False,
            },
            "embedding_cls": "image_audio",
            "image_embd_layer": {
                "crop_size": 448,
                "embedding_cls": "tune_image",
                "hd_transform_order": "sub_glb",
                "image_token_compression_cls": "avg_pool_2d",
                "projection_cls": "mlp",
                "use_hd_transform": True,
                "with_learnable_separator": True,
            },
        },
        "full_attn_mod": 1,
        "img_processor": None,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "model_type": "phi4mm",
        "sliding_window": 262144,
        "speech_lora": {"dp": 0.01, "layer": LORA_LAYERS, "lora_alpha": 2 * RANK, "r": RANK},
        "vision_config": {name: value for name, value in sight.items() if name != "model_type"},
        "vision_lora": {"dp": 0.0, "layer": LORA_LAYERS, "lora_alpha": 2 * RANK, "r": RANK},
    }


def main_name(name: str) -> str:
    """What the main revision calls a weight of transformers' class."""
    if any(name == f"model.layers.{layer}.{place}.weight" for layer in range(LAYERS) for place in SHAPES):
        return name.replace(".weight", ".base_layer.weight")
    renames = PHI_MAIN_NAMES | (PHI_MAIN_SOUND_NAMES if ".audio_embed.encoder.encoders." in name else {})
    for ours, theirs in renames.items():
        name = name.replace(ours, theirs)
    return name


TINY: dict[str, Callable[[Path], None]] = {"phi4_mm": make_phi4_mm}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
SOUND_FAMILIES = tuple(TINY)
FORMS["phi4_mm"] = "<|user|>{}<|end|><|assistant|>"
MARKERS["phi4_mm"] = ("<|image|>", "")
SOUND_MARKERS["phi4_mm"] = "<|audio|>"
