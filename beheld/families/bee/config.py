"""Bee's configuration: LLaVA-OneVision's entries, without videos."""

from __future__ import annotations

import re
from typing import Any

from transformers import LlavaOnevisionConfig

from beheld.core.errors import ModelError

_OTHER = "Use a checkpoint of the layout of Open-Bee/Bee-8B-RL."


class BeeConfig(LlavaOnevisionConfig):
    """config.json as published."""

    model_type = "bee"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content.

        Raises:
            ModelError: the language model is not Qwen3; it is named.
        """
        kind = (config_dict.get("text_config") or {}).get("model_type")
        if kind != "qwen3":
            raise ModelError(f"config.json has a text_config of the model type {kind!r}, which is not 'qwen3'.", _OTHER)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the settings of which one value is supported.

        Raises:
            ModelError: a setting has an unsupported value; it is named.
        """
        super().__post_init__(**kwargs)
        if not re.fullmatch(r"anyres_max_[1-9]\d*", self.vision_aspect_ratio):
            raise ModelError(
                f"vision_aspect_ratio {self.vision_aspect_ratio!r} in config.json is not 'anyres_max_' and a number.",
                _OTHER,
            )
        if self.vision_feature_select_strategy != "full":
            raise ModelError(
                f"vision_feature_select_strategy {self.vision_feature_select_strategy!r} in config.json is not 'full'.",
                _OTHER,
            )
        if not self.multimodal_projector_bias:
            raise ModelError("multimodal_projector_bias in config.json is false.", _OTHER)
        if not isinstance(self.vision_feature_layer, int):
            raise ModelError("vision_feature_layer in config.json is a list, not one number.", _OTHER)
