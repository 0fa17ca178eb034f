"""Small random checkpoints of MiniCPM-V, laid out as the checkpoint that a function names; see tiny.py."""

from __future__ import annotations

import copy
from pathlib import Path

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS

SEEDS: dict[str, int] = {"minicpmv": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""
MARKS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
_NAMES = {"lm_head.": "llm.lm_head.", "model.language_model.": "llm.model.", "model.vpm.": "vpm."}
_NAMES["model.resampler."] = "resampler."


def make_minicpmv(path: Path) -> None:
    """As openbmb/MiniCPM-V-2_6: slices that queries ask, and Qwen 2 under `llm.`."""
    import torch
    from safetensors.torch import save_file

    from beheld.families import registry

    specials = (*text.QWEN_TEXT_SPECIALS, *MARKS)
    settings = {"chat_template": text.QWEN_TEXT_CHAT, "unk_token": "<unk>"}
    ids = text.write_qwen_tokenizer(path, specials, "<|im_end|>", settings)
    config = tiny.LLAMA_SHAPE | {
        "architectures": ["MiniCPMV"],
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
        "model_type": "minicpmv",
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
    config = {name: value for name, value in config.items() if name != "head_dim"}
    config = tiny._reshape.get()(config)
    package = registry.find("minicpmv", ("MiniCPMV",))
    with torch.random.fork_rng():
        torch.manual_seed(SEEDS["minicpmv"])
        own = registry.own_class(package, "config").from_dict(copy.deepcopy(config))
        model = registry.own_class(package, "model")._from_config(own, dtype=torch.float32)
        tiny._fill(model)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[[*(ids[token] for token in specials if token != "<|im_end|>"), *range(len(ids), len(head))]] *= 0.05
    weights = {}
    for name, weight in model.state_dict().items():
        ours = next(prefix for prefix in _NAMES if name.startswith(prefix))
        weights[_NAMES[ours] + name.removeprefix(ours)] = weight.detach().to(torch.bfloat16).contiguous()
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


TINY = {"minicpmv": make_minicpmv}
IMAGE_FAMILIES = ("minicpmv",)
VIDEO_FAMILIES = ("minicpmv",)
CHATLESS_FAMILIES = ("minicpmv",)
"""Its template is the tokenizer's and takes text alone."""
FORMS["minicpmv"] = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
MARKERS["minicpmv"] = ("(<image>./</image>)\n", "(<video>./</video>)\n")
