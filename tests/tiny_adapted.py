"""Small random checkpoints of families that bring LoRA adapters of their own; see tiny.py for what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

SEEDS = {"phi4_mm": 1}
RANK = 4
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
{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{{- '<|image|>' -}}{%- endif -%}
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


TINY: dict[str, Callable[[Path], None]] = {"phi4_mm": make_phi4_mm}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
FORMS["phi4_mm"] = "<|user|>{}<|end|><|assistant|>"
MARKERS["phi4_mm"] = ("<|image|>", "")
