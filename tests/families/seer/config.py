"""Seer's configuration: a Llama for the text, and a tower of one block."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig


class SeerVisionConfig(PretrainedConfig):
    """The tower's sizes."""

    model_type = "seer_vision"
    hidden_size: int = 32
    num_heads: int = 2
    patch_size: int = 14
    merge_size: int = 2
    max_side: int = 32


class SeerConfig(PretrainedConfig):
    """The whole."""

    model_type = "seer"
    sub_configs = {"text_config": AutoConfig, "vision_config": SeerVisionConfig}  # noqa: RUF012
    text_config: Any = None
    vision_config: Any = None
    image_token_id: int = 0

    def __post_init__(self, **keywords: Any) -> None:
        """Make configurations of the parts, which come as dictionaries from a file."""
        if isinstance(self.text_config, dict):
            self.text_config = LlamaConfig(**self.text_config)
        if isinstance(self.vision_config, dict):
            self.vision_config = SeerVisionConfig(**self.vision_config)
        super().__post_init__(**keywords)
