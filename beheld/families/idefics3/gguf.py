"""GGUF files: the vision part of SmolVLM and Idefics 3 next to a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ProjectorFile

# Of PIL's filters, the one that the models' processors take (Lanczos).
_RESAMPLE = 1
_ACTIVATIONS = {"clip.use_gelu": "gelu_pytorch_tanh", "clip.use_silu": "silu"}
# Entries of config.json that belong to the whole model.
_WHOLE = ("dtype", "transformers_weights", "quantization_config", "tie_word_embeddings", "pad_token_id", "eos_token_id")


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them."""
    said = vision.header.metadata
    image, patch, scale = (
        vision.number(f"vision.{name}") for name in ("image_size", "patch_size", "projector.scale_factor")
    )
    side = image // patch
    if image % patch or side % scale:
        raise vision.refused(f"an image of {image} is not a whole number of {scale} x {scale} patches of {patch}")
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": vision.token("<image>"),
        "scale_factor": scale,
        "text_config": {name: value for name, value in text.items() if name not in _WHOLE[1:4]},
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": vision.number("vision.embedding_length"),
            "intermediate_size": vision.number("vision.feed_forward_length"),
            "num_hidden_layers": vision.number("vision.block_count"),
            "num_attention_heads": vision.number("vision.attention.head_count"),
            "layer_norm_eps": said.get("clip.vision.attention.layer_norm_epsilon", 1e-6),
            "hidden_act": next((act for key, act in _ACTIVATIONS.items() if said.get(key)), "gelu_pytorch_tanh"),
            "image_size": image,
            "patch_size": patch,
        },
        **{name: text[name] for name in _WHOLE if name in text},
    }
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_image_splitting": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "image_mean": vision.colours("vision.image_mean"),
        "image_std": vision.colours("vision.image_std"),
        "resample": _RESAMPLE,
        "rescale_factor": 1 / 255,
        "max_image_size": {"longest_edge": image},
        "size": {"longest_edge": said.get("clip.vision.preproc_image_size", image)},
    }
    return {
        "config.json": config,
        "preprocessor_config.json": processor,
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": (side // scale) ** 2},
    }
