"""Small random checkpoints of families whose layers attend beside the text: Llama 3.2 Vision.

Each is laid out as the checkpoint that its function names; see tiny.py for what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny
from tests import tiny_text as text
from tests.tiny_media import FORMS, MARKERS
from tests.tiny_more import chat, language, pixels

SEEDS: dict[str, int] = {"mllama": 1}
"""Family -> the seed of its weights; chosen so that greedy choices are clear (see oracle/test_tiny.py)."""

LLAMA3_MARKS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)


def make_mllama(path: Path) -> None:
    """As meta-llama/Llama-3.2-11B-Vision-Instruct: the id of a picture lies behind those that the head knows."""
    ids = _llama3_tokens(path)
    assert ids["<|image|>"] == tiny.VOCAB
    stops = [ids["<|end_of_text|>"], ids["<|eom_id|>"], ids["<|eot_id|>"]]
    config = {
        "architectures": ["MllamaForConditionalGeneration"],
        "image_token_index": ids["<|image|>"],
        "model_type": "mllama",
        "text_config": language("mllama_text_model", "MllamaForCausalLM")
        | {
            "bos_token_id": ids["<|begin_of_text|>"],
            "cross_attention_layers": [1, 3],
            "eos_token_id": stops,
            "num_hidden_layers": 5,
            "pad_token_id": ids["<|finetune_right_pad_id|>"],
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 512,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {
            "attention_heads": 2,
            "hidden_size": 32,
            "image_size": 56,
            "intermediate_layers_indices": [0, 1],
            "intermediate_size": 48,
            "max_num_tiles": 4,
            "model_type": "mllama_vision_model",
            "num_global_layers": 1,
            "num_hidden_layers": 3,
            "patch_size": 14,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            "vision_output_dim": 96,
        },
    }
    files = pixels("MllamaImageProcessor", "MllamaProcessor", do_pad=True, max_image_tiles=4, resample=2)
    text.write_json(path / "preprocessor_config.json", files | {"size": {"height": 56, "width": 56}})
    generation = {
        "bos_token_id": ids["<|begin_of_text|>"],
        "do_sample": True,
        "eos_token_id": stops,
        "pad_token_id": ids["<|finetune_right_pad_id|>"],
        "temperature": 0.6,
        "top_p": 0.9,
    }
    tiny._write_model(path, config, generation, ids, seed=SEEDS["mllama"], keep=("<|eot_id|>",))


def _llama3_tokens(path: Path) -> dict[str, int]:
    """Byte-level BPE as Llama 3 has it: the start of the text is added, and reserved marks fill up the vocabulary."""
    form = chat("<|start_header_id|>%role%<|end_header_id|>\\n\\n", "<|eot_id|>", "<|image|>", bos="<|begin_of_text|>")
    form += "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
    (path / "chat_template.jinja").write_text(form, encoding="utf-8")
    settings: dict[str, Any] = {
        "bos_token": "<|begin_of_text|>",
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|eot_id|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "pad_token": "<|finetune_right_pad_id|>",
        "processor_class": "MllamaProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return text.write_llama3_tokenizer(path, LLAMA3_MARKS, "<|image|>", tiny.VOCAB, settings)


TINY: dict[str, Callable[[Path], None]] = {"mllama": make_mllama}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
FORMS["mllama"] = "{}"
MARKERS["mllama"] = ("<|image|>", "")
