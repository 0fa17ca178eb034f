"""dots.ocr's configuration: Qwen2's, with the tower's as an entry."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen2Config

from beheld.core.errors import ModelError

# Setting of vision_config -> the one value that is supported.
_SUPPORTED = {"is_causal": False, "temporal_patch_size": 1}
_OTHER = "Use a checkpoint of the layout of rednote-hilab/dots.ocr."


class DotsVisionConfig(PreTrainedConfig):
    """The entry `vision_config`; the defaults are the published ones.

    Attributes:
        embed_dim: width of the layers.
        hidden_size: width of the embeddings after the merger.
        use_bias: whether attention and MLP have biases.
        post_norm: whether a norm follows the layers.
    """

    model_type = "dots_vit"
    embed_dim: int = 1536
    hidden_size: int = 1536
    intermediate_size: int = 4224
    num_hidden_layers: int = 42
    num_attention_heads: int = 12
    num_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 1
    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    is_causal: bool = False
    post_norm: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the settings.

        Raises:
            ModelError: a setting has an unsupported value; it is named.
        """
        for name, supported in _SUPPORTED.items():
            value = getattr(self, name)
            if value != supported:
                raise ModelError(f"vision_config.{name} {value!r} in config.json is not {supported!r}.", _OTHER)
        # The engine chooses the attention.
        kwargs.pop("attn_implementation", None)
        super().__post_init__(**kwargs)

    @property
    def num_heads(self) -> int:
        """Return the number of heads under the name that transformers' attention reads."""
        return self.num_attention_heads


class DotsOCRConfig(Qwen2Config):
    """config.json as published.

    Attributes:
        vision_config: the tower.
        image_token_id: the token `<|imgpad|>`.
    """

    model_type = "dots_ocr"
    sub_configs = {"vision_config": DotsVisionConfig}  # noqa: RUF012
    vision_config: Any = None
    image_token_id: int = 151665

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the tower's configuration.

        Raises:
            ModelError: the embeddings of images do not have the text's width.
        """
        given = self.vision_config
        if not isinstance(given, DotsVisionConfig):
            self.vision_config = DotsVisionConfig(**(given or {}))
        if given and self.vision_config.hidden_size != self.hidden_size:
            raise ModelError(
                f"vision_config.hidden_size {self.vision_config.hidden_size} in config.json is not hidden_size "
                f"{self.hidden_size}.",
                _OTHER,
            )
        super().__post_init__(**kwargs)
