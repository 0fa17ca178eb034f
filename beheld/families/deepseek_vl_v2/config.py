"""DeepSeek-VL2's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import SiglipVisionConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from beheld.families._shared.deepseek.config import ViewsConfig

# Name of a setting in config.json -> transformers' name, and the published code's value where config.json has none.
_VISION: dict[str, tuple[str, Any]] = {
    "heads": ("num_attention_heads", 16),
    "image_size": ("image_size", 384),
    "layers": ("num_hidden_layers", 24),
    "patch_size": ("patch_size", 16),
    "width": ("hidden_size", 1024),
}
_VISION_SUPPORTED: dict[str, tuple[Any, Any]] = {"class_token": (False, False), "ignore_head": (True, True)}
_PROJECTOR: dict[str, Any] = {
    "depth": 2,
    "downsample_ratio": 2,
    "input_dim": 1152,
    "mlp_ratio": 1,
    "n_embed": 2048,
}
_PROJECTOR_SUPPORTED: dict[str, tuple[Any, Any]] = {
    "projector_type": ("downsample_mlp_gelu", "downsample_mlp_gelu"),
    "token_pooling": (False, False),
}


class DeepseekVLV2Config(ViewsConfig):
    """config.json as published; `from_dict` reads it."""

    model_type = "deepseek_vl_v2"
    example = "deepseek-ai/deepseek-vl2-tiny"
    named = "DeepseekVLV2ForCausalLM"
    latent = True
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": DeepseekOcr2TextConfig, "vision_config": SiglipVisionConfig}

    @classmethod
    def vision(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of SigLIP's tower."""
        cls.check(raw, _VISION_SUPPORTED, "vision_config.")
        made = {ours: raw.get(theirs, absent) for theirs, (ours, absent) in _VISION.items()}
        if not all(isinstance(value, int) for value in made.values()):
            raise cls.refused("has another tower than SigLIP's in vision_config")
        return made | {
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": int(made["hidden_size"] * raw.get("mlp_ratio", 4)),
            "layer_norm_eps": 1e-6,
            "vision_use_head": False,
        }

    @classmethod
    def projector(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the projector's settings."""
        cls.check(raw, _PROJECTOR_SUPPORTED, "projector_config.")
        return {name: raw.get(name, absent) for name, absent in _PROJECTOR.items()}
