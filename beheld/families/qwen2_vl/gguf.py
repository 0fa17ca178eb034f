"""GGUF files: the vision part of Qwen2-VL and Qwen2.5-VL next to their text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ProjectorFile

# The published processors' bounds of an image's and a frame's pixels, which the file may state.
_PIXELS = (3_136, 12_845_056)
_MERGE, _TEMPORAL = 2, 2
# Entries of config.json that belong to the whole model.
_WHOLE = ("dtype", "transformers_weights", "quantization_config", "tie_word_embeddings")


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them."""
    width = vision.number("vision.embedding_length")
    first = vision.header.tensors.get("v.blk.0.ffn_up.weight")
    # Files state another number as the inner width.
    inner = 0 if first is None else max(first.shape)
    if inner < width or inner % width:
        raise vision.refused(f"the inner width {inner} of its tower's layers is no multiple of {width}")
    tower = {
        "embed_dim": width,
        "hidden_size": text["hidden_size"],
        "mlp_ratio": inner // width,
        "hidden_act": "quick_gelu",
    }
    return files_with("qwen2_vl", "Qwen2VL", tower, vision, text)


def files_with(
    model_type: str, classes: str, tower: Mapping[str, Any], vision: ProjectorFile, text: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the files of a model.

    Args:
        model_type: the model's.
        classes: what the names of its classes begin with.
        tower: the part of its vision_config that other models do not share.
        vision: the file.
        text: the text model's config.json.

    Raises:
        ModelError: an entry is missing or does not fit.
    """
    said = vision.header.metadata
    patch, merge = vision.number("vision.patch_size"), vision.number("vision.spatial_merge_size", _MERGE)
    sections = vision.text_said.get("qwen2vl.rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) < 3 or sum(sections[:3]) != text["head_dim"] // 2:
        raise vision.refused(f"the text model's positions have the sections {sections!r}, which do not fit its heads")
    config = {
        "architectures": [f"{classes}ForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": vision.token("<|image_pad|>"),
        "video_token_id": vision.token("<|video_pad|>"),
        "vision_start_token_id": vision.token("<|vision_start|>"),
        "vision_end_token_id": vision.token("<|vision_end|>"),
        "text_config": {
            **{name: value for name, value in text.items() if name not in _WHOLE[1:]},
            "model_type": f"{model_type}_text",
            "rope_parameters": text["rope_parameters"] | {"mrope_section": sections[:3]},
        },
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "depth": vision.number("vision.block_count"),
            "num_heads": vision.number("vision.attention.head_count"),
            "in_channels": 3,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": _TEMPORAL,
            **tower,
        },
        **{name: text[name] for name in _WHOLE if name in text},
    }
    least, most = (
        said.get(f"clip.vision.image_{name}_pixels", bound) for name, bound in zip(("min", "max"), _PIXELS, strict=True)
    )
    processor = {
        "processor_class": f"{classes}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": vision.colours("vision.image_mean"),
        "image_std": vision.colours("vision.image_std"),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": _TEMPORAL,
    }
    return {
        "config.json": config,
        "preprocessor_config.json": processor | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": processor
        | {"video_processor_type": "Qwen2VLVideoProcessor", "cap_pixels_per_frame": False},
    }
