"""GGUF files: the vision part of Qwen3-VL next to its text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beheld.checkpoint.gguf.projector import ProjectorFile

# The published processors' bounds of an image's pixels, which the file may state, and of a video's.
_IMAGE_PIXELS = (65_536, 16_777_216)
_VIDEO_PIXELS = (4_096, 25_165_824)
_TEMPORAL = 2
# Entries of config.json that belong to the whole model.
_WHOLE = ("dtype", "transformers_weights", "quantization_config", "tie_word_embeddings")


def files(vision: ProjectorFile, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's files, as transformers' classes read them."""
    said = vision.header.metadata
    image, patch = (vision.number(f"vision.{name}") for name in ("image_size", "patch_size"))
    merge = vision.number("vision.spatial_merge_size")
    if image % patch:
        raise vision.refused(f"an image of {image} is not a whole number of patches of {patch}")
    sections = vision.text_said.get("qwen3vl.rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) < 3 or sum(sections[:3]) != text["head_dim"] // 2:
        raise vision.refused(f"the text model's positions have the sections {sections!r}, which do not fit its heads")
    deep = said.get("clip.vision.is_deepstack_layers") or []
    rope = text["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": sections[:3]}
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": vision.token("<|image_pad|>"),
        "video_token_id": vision.token("<|video_pad|>"),
        "vision_start_token_id": vision.token("<|vision_start|>"),
        "vision_end_token_id": vision.token("<|vision_end|>"),
        "text_config": {
            **{name: value for name, value in text.items() if name not in _WHOLE[1:]},
            "model_type": "qwen3_vl_text",
            "rope_parameters": rope,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_size": vision.number("vision.embedding_length"),
            "intermediate_size": vision.number("vision.feed_forward_length"),
            "depth": vision.number("vision.block_count"),
            "num_heads": vision.number("vision.attention.head_count"),
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "num_position_embeddings": (image // patch) ** 2,
            "out_hidden_size": text["hidden_size"],
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": _TEMPORAL,
            "deepstack_visual_indexes": [index for index, is_deep in enumerate(deep) if is_deep is True],
        },
        **{name: text[name] for name in _WHOLE if name in text},
    }
    least, most = (
        said.get(f"clip.vision.image_{name}_pixels", bound)
        for name, bound in zip(("min", "max"), _IMAGE_PIXELS, strict=True)
    )
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": vision.colours("vision.image_mean"),
        "image_std": vision.colours("vision.image_std"),
        "resample": 3,
        "rescale_factor": 1 / 255,
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": _TEMPORAL,
    }
    sizes = [{"shortest_edge": low, "longest_edge": high} for low, high in ((least, most), _VIDEO_PIXELS)]
    return {
        "config.json": config,
        "preprocessor_config.json": processor | {"image_processor_type": "Qwen2VLImageProcessor", "size": sizes[0]},
        "video_preprocessor_config.json": processor
        | {"video_processor_type": "Qwen3VLVideoProcessor", "size": sizes[1]},
    }
