"""Small random checkpoints of families whose layers attend beside the text: Llama 3.2 Vision and Florence-2.

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
from tests.tiny_peculiar import byte_tokens

SEEDS: dict[str, int] = {"mllama": 1, "florence2": 15}
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


FLORENCE_MARKS = (
    *("<od>", "</od>", "<ocr>", "</ocr>"),
    *(f"<loc_{place}>" for place in range(1000)),
    *("<cap>", "</cap>", "<ncap>", "</ncap>", "<dcap>", "</dcap>", "<grounding>", "</grounding>", "<seg>", "</seg>"),
    *("<sep>", "<region_cap>", "</region_cap>", "<region_to_desciption>", "</region_to_desciption>"),
    *("<proposal>", "</proposal>", "<poly>", "</poly>", "<and>"),
)
BART_MARKS = ("<s>", "<pad>", "</s>", "<unk>")
FLORENCE_GENERATION = {
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "early_stopping": True,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "no_repeat_ngram_size": 3,
    "num_beams": 3,
    "pad_token_id": 1,
}
BART_SHAPE = {
    "activation_function": "gelu",
    "bos_token_id": 0,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_start_token_id": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "is_encoder_decoder": True,
    "max_position_embeddings": 1024,
    "no_repeat_ngram_size": 3,
    "num_beams": 3,
    "num_hidden_layers": 2,
    "pad_token_id": 1,
    "scale_embedding": False,
}
DAVIT = {
    "depths": [1, 2],
    "drop_path_rate": 0.1,
    "num_groups": [2, 4],
    "num_heads": [2, 4],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "projection_dim": 64,
    "window_size": 4,
}
FLORENCE_PIXELS = {
    "crop_size": {"height": 56, "width": 56},
    "do_center_crop": False,
    "image_seq_length": 50,
    "size": {"height": 56, "width": 56},
}


def make_florence2(path: Path) -> None:
    """As florence-community/Florence-2-large: BART over a DaViT tower, tied embeddings, padded to a multiple of 64."""
    settings = bart_settings() | {"extra_special_tokens": {"image_token": "<image>"}}
    ids = byte_tokens(path, BART_MARKS, ("<mask>", *FLORENCE_MARKS, "<image>"), "<s>", settings)
    config = {
        "architectures": ["Florence2ForConditionalGeneration"],
        "image_token_id": ids["<image>"],
        "is_encoder_decoder": True,
        "model_type": "florence2",
        "text_config": BART_SHAPE | {"model_type": "bart", "vocab_size": -(-len(ids) // 64) * 64},
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vision_config": DAVIT
        | {
            "embed_dim": [16, 32],
            "max_position_embeddings": 20,
            "max_temporal_embeddings": 100,
            "model_type": "florence_vision",
        },
    }
    files = pixels("CLIPImageProcessor", "Florence2Processor", **FLORENCE_PIXELS)
    text.write_json(path / "preprocessor_config.json", files)
    text.write_json(path / "processor_config.json", {"processor_class": "Florence2Processor"})

    def clear(model: Any) -> None:
        """Padding never wins, and answers change from place to place: tied embeddings would repeat their tokens."""
        model.get_output_embeddings().weight[len(ids) :] *= 0.05
        decoder = model.model.language_model.decoder
        decoder.embed_positions.weight *= 1.5
        model.model.language_model.encoder.embed_positions.weight *= 0.3
        places = model.model.multi_modal_projector.image_position_embed
        places.row_embeddings.weight *= 0.2
        places.column_embeddings.weight *= 0.2
        for layer in decoder.layers:
            # Every answer begins with the same two tokens: what differs is the prompt.
            layer.encoder_attn.q_proj.weight *= 3
            layer.encoder_attn.out_proj.weight *= 3
        decoder.layers[-1].final_layer_norm.weight *= 3

    tiny._write_model(path, config, FLORENCE_GENERATION, ids, seed=SEEDS["florence2"], keep=("</s>",), adjust=clear)


def bart_settings() -> dict[str, Any]:
    """tokenizer_config.json as facebook/bart-large has it."""
    return {
        "add_prefix_space": False,
        "cls_token": "<s>",
        "eos_token": "</s>",
        "mask_token": "<mask>",
        "pad_token": "<pad>",
        "sep_token": "</s>",
        "tokenizer_class": "BartTokenizer",
        "unk_token": "<unk>",
    }


TINY: dict[str, Callable[[Path], None]] = {"mllama": make_mllama, "florence2": make_florence2}
IMAGE_FAMILIES = tuple(TINY)
VIDEO_FAMILIES: tuple[str, ...] = ()
FORMS.update({"mllama": "{}", "florence2": "{}"})
# Florence-2's processor puts the picture first, whatever the prompt says.
MARKERS.update({"mllama": ("<|image|>", ""), "florence2": ("", "")})


def make_microsoft_florence2(path: Path, tokens: Path) -> None:
    """The weights of the tiny florence2 in the layout of microsoft/Florence-2-large; `tokens` gets facebook/bart-large.

    Names, configuration and files are those of the repositories, whose code of their own is left out.
    """
    import torch
    from safetensors.torch import load_file, save_file

    native = tiny.checkpoint("florence2")
    weights = load_file(native / "model.safetensors")
    marks = len(FLORENCE_MARKS)
    for folder in (path, tokens):
        byte_tokens(folder, BART_MARKS, ("<mask>",), "<s>", bart_settings())
    vocab_size = text.json.loads((native / "config.json").read_text(encoding="utf-8"))["image_token_id"]
    assert vocab_size == marks + 1 + len(text.json.loads((path / "vocab.json").read_text(encoding="utf-8")))
    made = {microsoft_name(name): weight for name, weight in weights.items()}
    made["image_projection"] = made["image_projection"].t().contiguous()
    shared = made["language_model.model.shared.weight"][:vocab_size].clone()
    made["language_model.model.shared.weight"] = shared
    made["language_model.final_logits_bias"] = torch.zeros(1, vocab_size, dtype=shared.dtype)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoConfig": "configuration_florence2.Florence2Config"}
    tower: dict[str, Any] = DAVIT | {
        "dim_embed": [16, 32],
        "enable_checkpoint": False,
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        "image_pos_embed": {"max_pos_embeddings": 20, "type": "learned_abs_2d"},
        "model_type": "davit",
        "visual_temporal_embedding": {"max_temporal_embeddings": 100, "type": "COSINE"},
    }
    config = {
        "architectures": ["Florence2ForConditionalGeneration"],
        "auto_map": code | {"AutoModelForCausalLM": "modeling_florence2.Florence2ForConditionalGeneration"},
        "bos_token_id": 0,
        "eos_token_id": 2,
        "ignore_index": -100,
        "is_encoder_decoder": True,
        "model_type": "florence2",
        "pad_token_id": 1,
        "projection_dim": 64,
        "text_config": BART_SHAPE | {"model_type": "florence2_language", "vocab_size": vocab_size},
        "torch_dtype": "float16",
        "vision_config": tower,
        "vocab_size": vocab_size,
    }
    text.write_json(path / "config.json", config)
    files = pixels("CLIPImageProcessor", "Florence2Processor", **FLORENCE_PIXELS)
    text.write_json(
        path / "preprocessor_config.json",
        files | {"auto_map": {"AutoProcessor": "processing_florence2.Florence2Processor"}},
    )
    text.write_json(path / "generation_config.json", FLORENCE_GENERATION)
    text.write_json(tokens / "config.json", {"model_type": "bart"})


def microsoft_name(name: str) -> str:
    """What microsoft's repository calls a weight of transformers' class."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    projector = "multi_modal_projector."
    if name.startswith(projector):
        own = {"image_projection.weight": "image_projection"}
        short = name.removeprefix(projector)
        return own.get(short, short.replace("image_position_embed.", "image_pos_embed."))
    if name.startswith("vision_tower.convs."):
        return name.replace(".conv.", ".proj.")
    block = "window_attn" if ".spatial_block." in name else "channel_attn"
    for old, new in (
        (".conv1.", ".conv1.fn.dw."),
        (".conv2.", ".conv2.fn.dw."),
        (f".{block}.", f".{block}.fn."),
        (".ffn.", ".ffn.fn.net."),
        (".norm1.", f".{block}.norm."),
        (".norm2.", ".ffn.norm."),
    ):
        if old in name:
            return name.replace(old, new)
    return name
