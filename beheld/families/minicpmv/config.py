"""MiniCPM-V's configuration: Qwen2's at the top level, and the tower's."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2Config, SiglipVisionConfig

from beheld.core.errors import ModelError


class MiniCPMVConfig(Qwen2Config):
    """config.json as published.

    Attributes:
        version: the version of the architecture.
        query_num: embeddings of one slice.
        drop_vision_last_layer: whether the tower ends before its last layer.
        vision_config: the tower.
        image_token_id: of `<unk>`; the tokenizer's files name it, see Family.placeholder_tokens.
    """

    model_type = "minicpmv"
    model_name: ClassVar[str] = "MiniCPM-V"
    sub_configs = {"vision_config": SiglipVisionConfig}  # noqa: RUF012
    version: Any = None
    query_num: int = 64
    drop_vision_last_layer: bool = False
    vision_config: Any = None
    image_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the version and make the tower's configuration.

        Raises:
            ModelError: the version has another architecture.
        """
        # transformers makes a configuration without arguments to learn its defaults.
        if self.vision_config is not None and str(self.version) != "2.6":
            raise ModelError(
                f"{self.model_name} version {self.version} in config.json is not supported; only 2.6 is.",
                "Use a checkpoint of the layout of openbmb/MiniCPM-V-2_6.",
            )
        if not isinstance(self.vision_config, SiglipVisionConfig):
            given = {key: value for key, value in (self.vision_config or {}).items() if key != "model_type"}
            self.vision_config = SiglipVisionConfig(**given)
        super().__post_init__(**kwargs)
