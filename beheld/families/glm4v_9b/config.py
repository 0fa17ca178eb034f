"""GLM-4V-9B's configuration: GLM's shape under the names of ChatGLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GlmConfig, PreTrainedConfig

from beheld.core.errors import ModelError

# Setting of config.json -> the one value that is supported, and the value where it is missing.
_SUPPORTED: Mapping[str, tuple[Any, Any]] = {
    "add_bias_linear": (False, False),
    "apply_residual_connection_post_layernorm": (False, False),
    "fp32_residual_connection": (False, False),
    "interleaved_qkv": (False, False),
    "multi_query_attention": (True, False),
    "original_rope": (True, True),
    "post_layer_norm": (True, True),
    "pre_seq_len": (None, None),
    "quantization_bit": (0, 0),
    "rmsnorm": (True, True),
    "tie_word_embeddings": (False, False),
}
# Published name -> GLM's.
_NAMES = {
    "add_qkv_bias": "attention_bias",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "multi_query_group_num": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
}
# Settings of training, and of how attention is computed; the engine chooses that.
_WITHOUT_EFFECT = (
    "apply_query_key_layer_scaling",
    "attention_softmax_in_fp32",
    "attn_implementation",
    "bias_dropout_fusion",
    "classifier_dropout",
    "hidden_dropout",
    "prefix_projection",
)
_NEEDED = ("boi_token_id", "eoi_token_id", *(name for name in _NAMES if name != "add_qkv_bias"))
_OTHER = "Use a checkpoint of the layout of zai-org/glm-4v-9b."


class GLM4VVisionConfig(PreTrainedConfig):
    """The entry `vision_config`; the defaults are the published ones.

    Attributes:
        num_positions: the number of learned positions: those of the patches, and of the first.
        scaling_factor: divides the embeddings of images.
    """

    model_type = "glm4v_9b_vision"
    hidden_act: str = "gelu"
    hidden_size: int = 1792
    image_size: int = 1120
    in_channels: int = 3
    intermediate_size: int = 15360
    layer_norm_eps: float = 1e-6
    num_heads: int = 16
    num_hidden_layers: int = 63
    num_positions: int = 6401
    patch_size: int = 14
    scaling_factor: float = 8

    @property
    def side(self) -> int:
        """Return the patches along each side of an image."""
        return self.image_size // self.patch_size

    @property
    def num_embeds(self) -> int:
        """Return the number of embeddings of an image: of groups of 2 x 2 patches, and of its beginning and end."""
        return (self.side // 2) ** 2 + 2


class GLM4VConfig(GlmConfig):
    """config.json as published; `from_dict` reads it.

    Attributes:
        vision_config: the tower.
        boi_token_id, eoi_token_id: the tokens `<|begin_of_image|>` and `<|end_of_image|>`.
        image_token_id: the token between them, `<|endoftext|>`.
    """

    model_type = "chatglm"
    sub_configs = {"vision_config": GLM4VVisionConfig}  # noqa: RUF012
    vision_config: Any = None
    boi_token_id: int = 151339
    eoi_token_id: int = 151340
    image_token_id: int = 151329

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content, as published or as written by transformers.

        Raises:
            ModelError: it is of a text model, or a setting is missing or has an unsupported value; it is named.
        """
        if config_dict.get("vision_config") is None:
            raise ModelError(
                "config.json has the model type 'chatglm' and no vision_config: it is of a text model, which has no "
                "definition in this layout.",
                "Use the checkpoint in transformers' layout, whose name ends with -hf: zai-org/glm-4-9b-chat-hf, say.",
            )
        if "padded_vocab_size" not in config_dict and "vocab_size" in config_dict:
            return super().from_dict(config_dict, **kwargs)
        made = dict(config_dict)
        for name, (supported, default) in _SUPPORTED.items():
            value = made.pop(name, default)
            if value != supported:
                raise ModelError(f"{name} {value!r} in config.json is not {supported!r}.", _OTHER)
        for name in _NEEDED:
            if made.get(name) is None:
                raise ModelError(f"config.json has no {name}.", _OTHER)
        for name in _WITHOUT_EFFECT:
            made.pop(name, None)
        made |= {ours: made.pop(theirs) for theirs, ours in _NAMES.items() if theirs in made}
        made.setdefault("attention_bias", False)
        made |= {"rope_theta": 10000.0 * (made.pop("rope_ratio", None) or 1), "tie_word_embeddings": False}
        return super().from_dict(made, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the tower's configuration.

        Raises:
            ModelError: its settings contradict each other.
        """
        if not isinstance(self.vision_config, GLM4VVisionConfig):
            self.vision_config = GLM4VVisionConfig(**(self.vision_config or {}))
        vision = self.vision_config
        if vision.num_positions != vision.side**2 + 1:
            raise ModelError(
                f"vision_config.num_positions {vision.num_positions} in config.json is not {vision.side**2 + 1}, the "
                f"number of patches of {vision.image_size} x {vision.image_size} pixels and one.",
                _OTHER,
            )
        super().__post_init__(**kwargs)
