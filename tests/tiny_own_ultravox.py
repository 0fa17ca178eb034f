"""A small random checkpoint of Ultravox, laid out as the one that its function names; see tiny.py.

What config.json names lies in folders below: the real repositories hold the projector, the encoder and the language
model apart.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.oracle.cases import Ask
from tests.tiny_media import FORMS, MARKERS, SOUND_MARKERS
from tests.tiny_sound import EARS, whisper_features

SEEDS: dict[str, int] = {"ultravox": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
TEXT, EAR = "meta-llama/Llama-3.2-1B-Instruct", "openai/whisper-large-v3-turbo"
MARKS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
CHAT = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
_NAMES = {
    "lm_head.": (TEXT, "lm_head."),
    "model.language_model.": (TEXT, "model."),
    "model.audio_tower.": (EAR, "model.encoder."),
    "model.multi_modal_projector.": (".", "multi_modal_projector."),
}


def make_ultravox(path: Path) -> None:
    """As fixie-ai/ultravox-v0_5-llama-3_2-1b: a projector alone, and the names of the other parts."""
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    settings = {
        "bos_token": "<|begin_of_text|>",
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|eot_id|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    ids = text.write_llama3_tokenizer(path, MARKS, "<|audio|>", tiny.VOCAB, settings)
    stops = [ids["<|end_of_text|>"], ids["<|eom_id|>"], ids["<|eot_id|>"]]
    config = {
        "architectures": ["UltravoxModel"],
        "audio_latency_block_size": None,
        "audio_model_id": EAR,
        "audio_token_index": ids["<|audio|>"],
        "auto_map": {
            "AutoConfig": "ultravox_config.UltravoxConfig",
            "AutoModel": "ultravox_model.UltravoxModel",
            "AutoProcessor": "ultravox_processing.UltravoxProcessor",
        },
        "hidden_size": 96,
        "ignore_index": -100,
        "initializer_range": 0.02,
        "model_type": "ultravox",
        "norm_init": 0.4,
        "pad_token_id": ids["<|end_of_text|>"],
        "projector_act": "swiglu",
        "projector_ln_mid": True,
        "stack_factor": 8,
        "text_model_id": TEXT,
        "torch_dtype": "bfloat16",
        "vocab_size": tiny.VOCAB,
    }
    language = tiny._reshape.get()({"text_config": _language(ids, stops)})["text_config"]
    ears = EARS | {
        "architectures": ["WhisperForConditionalGeneration"],
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 64,
        "decoder_layers": 1,
        "max_source_positions": 1500,
        "model_type": "whisper",
        "torch_dtype": "float16",
        "vocab_size": 51866,
    }
    package = registry.find("ultravox", ("UltravoxModel",))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS["ultravox"])
        whole = copy.deepcopy(config | {"text_config": language, "audio_config": ears})
        own = registry.own_class(package, "config").from_dict(whole)
        model = registry.own_class(package, "model")._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    quiet = [ids[token] for token in ids if token.startswith("<|") and token not in ("<|eot_id|>", "<|audio|>")]
    with torch.no_grad():
        model.get_output_embeddings().weight[quiet] *= 0.05
    weights: dict[str, dict[str, Any]] = {}
    for name, weight in model.state_dict().items():
        if name.startswith("lm_head."):
            continue
        prefix = next(prefix for prefix in _NAMES if name.startswith(prefix))
        folder, published = _NAMES[prefix]
        dtype = torch.float16 if folder == EAR else torch.bfloat16
        own_names = weights.setdefault(folder, {})
        own_names[published + name.removeprefix(prefix)] = weight.detach().to(dtype).contiguous()
    # What a checkpoint of Whisper holds beside its encoder.
    weights[EAR]["model.decoder.layer_norm.weight"] = torch.ones(32, dtype=torch.float16)
    for folder, content in weights.items():
        (path / folder).mkdir(parents=True, exist_ok=True)
        save_file(content, path / folder / "model.safetensors", metadata={"format": "pt"})
    text.write_json(path / "config.json", config)
    text.write_json(path / TEXT / "config.json", language)
    text.write_json(path / EAR / "config.json", ears)
    whole_window = {"chunk_length": 30, "n_samples": 480000, "nb_max_frames": 3000}
    text.write_json(path / EAR / "preprocessor_config.json", whisper_features("WhisperProcessor", **whole_window))
    generation = {"bos_token_id": ids["<|begin_of_text|>"], "eos_token_id": stops, "pad_token_id": stops[0]}
    text.write_json(path / "generation_config.json", generation)


def _language(ids: dict[str, int], stops: list[int]) -> dict[str, Any]:
    return tiny.LLAMA_SHAPE | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": stops,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


TINY = {"ultravox": make_ultravox}
# The published processor fills up all audio of a prompt to the longest; alike ones are as if alone.
REFERENCE_ASKS = {
    "ultravox": {
        "sounds": Ask("A sound {a} and another {a} then {a} are they alike?", sounds=((0.53, 3), (0.53, 4), (0.53, 3))),
        "odd_sound": Ask("{a}What?", sounds=((0.6437, 8),)),
        "short_sound": Ask("What is{a}", sounds=((0.01, 6),)),
        "whole_window": Ask("{a}Sum up", sounds=((30.0, 9),)),
        "two_windows": Ask("{a}Sum up", sounds=((30.5, 9),)),
        "three_windows": Ask("{a}Sum up {a}", sounds=((61.03, 10), (61.03, 11))),
    }
}
SOUND_FAMILIES = ("ultravox",)
CHATLESS_FAMILIES = ("ultravox",)
"""Its template is the tokenizer's and takes text alone."""
FORMS["ultravox"] = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
SOUND_MARKERS["ultravox"] = "<|audio|>"
MARKERS["ultravox"] = ("", "")
