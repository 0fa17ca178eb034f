"""GGUF files: the vision part of Gemma 3 next to its text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ADDED, ProjectorFile

# Patches along a side that become one embedding, unless the file says otherwise.
_POOLED = 4
# Of PIL's filters, the one that the models' processors take (bilinear).
_RESAMPLE = 2
# Converters leave the first one out.
_PLACE, _BEGIN, _END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
# Entries of config.json that belong to the whole model.
_WHOLE = ("dtype", "transformers_weights", "quantization_config", "tie_word_embeddings", "eos_token_id")


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them."""
    said = vision.header.metadata
    image, patch = (vision.number(f"vision.{name}") for name in ("image_size", "patch_size"))
    pooled = vision.number("vision.projector.scale_factor", _POOLED)
    side = image // patch
    if image % patch or side % pooled:
        raise vision.refused(f"an image of {image} is not a whole number of {pooled} x {pooled} patches of {patch}")
    embeddings = (side // pooled) ** 2
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": vision.place(_PLACE),
        "boi_token_index": vision.token(_BEGIN),
        "eoi_token_index": vision.token(_END),
        "mm_tokens_per_image": embeddings,
        "text_config": {name: value for name, value in text.items() if name not in _WHOLE[1:4]},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": vision.number("vision.embedding_length"),
            "intermediate_size": vision.number("vision.feed_forward_length"),
            "num_hidden_layers": vision.number("vision.block_count"),
            "num_attention_heads": vision.number("vision.attention.head_count"),
            "layer_norm_eps": said.get("clip.vision.attention.layer_norm_epsilon", 1e-6),
            "hidden_act": "gelu_pytorch_tanh",
            "image_size": image,
            "patch_size": patch,
            "vision_use_head": False,
        },
        **{name: text[name] for name in _WHOLE if name in text},
    }
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": vision.colours("vision.image_mean"),
        "image_std": vision.colours("vision.image_std"),
        "image_seq_length": embeddings,
        "resample": _RESAMPLE,
        "rescale_factor": 1 / 255,
        "size": {"height": image, "width": image},
    }
    return {
        "config.json": config,
        "preprocessor_config.json": processor,
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": embeddings},
        "tokenizer_config.json": {"image_token": _PLACE, "boi_token": _BEGIN, "eoi_token": _END},
        ADDED: [_PLACE],
    }
