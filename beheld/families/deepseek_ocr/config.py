"""DeepSeek-OCR's configuration: the sizes of both towers stand in `vision_config.width`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import CLIPVisionConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import (
    DeepseekOcr2SamVisionConfig,
    DeepseekOcr2TextConfig,
)

from beheld.families._shared.deepseek.config import PartsConfig, ViewsConfig

_SAM, _CLIP = "sam_vit_b", "clip-l-14-224"
_PATCH = 16
_PROJECTOR_SUPPORTED: dict[str, tuple[Any, Any]] = {
    "projector_type": ("linear", None),
    "token_pooling": (False, False),
}


class DeepEncoderConfig(PartsConfig):
    """The towers: SAM's with two further convolutions, then CLIP's over the result."""

    model_type = "deepseek_ocr_encoder"
    sub_configs: ClassVar[dict[str, Any]] = {
        "sam_config": DeepseekOcr2SamVisionConfig,
        "clip_config": CLIPVisionConfig,
    }
    sam_config: Any = None
    clip_config: Any = None


class DeepseekOCRConfig(ViewsConfig):
    """config.json as published; `from_dict` reads it."""

    model_type = "deepseek_ocr"
    example = "deepseek-ai/DeepSeek-OCR"
    named = "DeepseekOCRForCausalLM"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": DeepseekOcr2TextConfig, "vision_config": DeepEncoderConfig}

    @classmethod
    def vision(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of both towers."""
        towers = raw.get("width")
        if not isinstance(towers, Mapping) or not {_SAM, _CLIP} <= towers.keys():
            raise cls.refused(f"has other towers than {_SAM} and {_CLIP} in vision_config.width")
        sam, clip = towers[_SAM], towers[_CLIP]
        channels = list(sam["downsample_channels"])
        if len(channels) != 2 or channels[1] != clip["width"]:
            raise cls.refused(f"has downsample_channels {channels} before a tower of {clip['width']}")
        return {
            "clip_config": {
                "hidden_act": "quick_gelu",
                "hidden_size": clip["width"],
                "image_size": clip["image_size"],
                "intermediate_size": 4 * clip["width"],
                "layer_norm_eps": 1e-5,
                "num_attention_heads": clip["heads"],
                "num_hidden_layers": clip["layers"],
                "patch_size": clip["patch_size"],
            },
            "sam_config": {
                "downsample_channels": channels,
                "global_attn_indexes": list(sam["global_attn_indexes"]),
                "hidden_size": sam["width"],
                "image_size": raw.get("image_size", 1024),
                "mlp_ratio": 4.0,
                "num_attention_heads": sam["heads"],
                "num_hidden_layers": sam["layers"],
                # In the published code; a smaller checkpoint's config.json overrides it.
                "output_channels": sam.get("output_channels", 256),
                "patch_size": _PATCH,
                "window_size": 14,
            },
        }

    @classmethod
    def projector(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the projector's settings."""
        cls.check(raw, _PROJECTOR_SUPPORTED, "projector_config.")
        return {"input_dim": raw["input_dim"], "n_embed": raw["n_embed"]}
