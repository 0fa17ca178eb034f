"""GGUF files: the vision part of LLaVA-1.5 next to a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ADDED, ProjectorFile
from beheld.core.errors import ModelError

# The original model has no such token; the published checkpoint in transformers' layout has it after the others.
_IMAGE = "<image>"
# Of PIL's filters, the one that the models' processors take (bicubic).
_RESAMPLE = 3
# Entries of config.json that belong to the whole model.
_WHOLE = ("dtype", "transformers_weights", "quantization_config", "tie_word_embeddings", "pad_token_id", "eos_token_id")
# What files of models with tiles state, LLaVA-1.6 among them.
_TILED = ("image_grid_pinpoints", "image_crop_resolution", "image_split_resolution")


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them.

    Raises:
        ModelError: an entry is missing or does not fit, or the file is of another model with such a projector.
    """
    said = vision.header.metadata
    image, patch, layers = (vision.number(f"vision.{name}") for name in ("image_size", "patch_size", "block_count"))
    if image % patch:
        raise vision.refused(f"an image of {image} is not a whole number of patches of {patch}")
    # The file has the layers up to the one whose output is projected.
    other = [name for name in _TILED if f"clip.vision.{name}" in said]
    other += ["mm_patch_merge_type"] * (said.get("clip.vision.mm_patch_merge_type", "flat") != "flat")
    other += ["feature_layer"] * (said.get("clip.vision.feature_layer", [layers]) != [layers])
    other += ["class_embd"] * ("v.class_embd" not in vision.header.tensors)
    if other:
        raise ModelError(
            f"{vision.file.name} is of no LLaVA-1.5 ({', '.join(other)}), and other models with the projector 'mlp' "
            "are not read.",
            "Use the model's checkpoint in transformers' layout for images; for text alone, give mmproj=''.",
        )
    projected = vision.header.tensors.get("mm.2.weight")
    if projected is None or projected.shape[0] != text["hidden_size"]:
        width = "nothing" if projected is None else f"{projected.shape[0]} numbers"
        raise ModelError(
            f"{vision.file.name} makes {width} of a patch, and the text model has {text['hidden_size']}.",
            "Give the text model and the mmproj file of one model.",
        )
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": vision.place(_IMAGE),
        "image_seq_length": (image // patch) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "text_config": {name: value for name, value in text.items() if name not in _WHOLE[1:4]},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.number("vision.embedding_length"),
            "intermediate_size": vision.number("vision.feed_forward_length"),
            "projection_dim": vision.number("vision.projection_dim", 768),
            "num_hidden_layers": layers,
            "num_attention_heads": vision.number("vision.attention.head_count"),
            "layer_norm_eps": said.get("clip.vision.attention.layer_norm_epsilon", 1e-5),
            "hidden_act": "gelu" if said.get("clip.use_gelu") else "quick_gelu",
            "image_size": image,
            "patch_size": patch,
        },
        **{name: text[name] for name in _WHOLE if name in text},
    }
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_center_crop": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": vision.colours("vision.image_mean"),
        "image_std": vision.colours("vision.image_std"),
        "resample": _RESAMPLE,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": image},
        "crop_size": {"height": image, "width": image},
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": _IMAGE,
        "patch_size": patch,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    return {
        "config.json": config,
        "preprocessor_config.json": pixels,
        "processor_config.json": processor,
        ADDED: [_IMAGE],
    }
