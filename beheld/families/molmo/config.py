"""Molmo's configuration: Qwen 2's shape under the published names."""

from __future__ import annotations

from typing import Any

from transformers import CLIPVisionConfig, Qwen2Config

from beheld.core.errors import ModelError
from beheld.families._shared.config import CLIP_L_336

# The tower's sizes are in the repository's code, not in its configuration; a smaller checkpoint's `vision_config`
# overrides them.
_TOWER = {**CLIP_L_336, "num_hidden_layers": 23}
ADDED = 128
"""Rows of the second part of the table of embeddings: tokens that no answer has."""
# The place of the patch's token among these.
_PATCH = 2
# The variants of OLMo's text have other values.
_SUPPORTED = {
    "attention_layer_norm": False,
    "clip_qkv": None,
    "layer_norm_type": "rms",
    "norm_after": False,
    "use_position_ids": True,
    "weight_tying": False,
}


class MolmoConfig(Qwen2Config):
    """config.json as published; `from_dict` reads it.

    Attributes:
        vision_config: the tower; CLIP-L/336 unless config.json has the entry.
        vit_layers: the tower's layers, counted from its last, whose outputs are the features.
        embedding_size: rows of the first part of the table of embeddings, and of the head.
        qkv_bias: whether the projections of attention have a bias, which Qwen 2's always have.
        image_token_id: the token of a patch.
    """

    model_type = "molmo"
    sub_configs = {"vision_config": CLIPVisionConfig}  # noqa: RUF012
    vision_config: Any = None
    vit_layers: Any = (-2, -9)
    embedding_size: int = 152064
    qkv_bias: bool = True
    image_token_id: int = 152066

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content, as published or as written by transformers.

        Raises:
            ModelError: a setting has an unsupported value; it is named.
        """
        if "layer_norm_eps" not in config_dict:
            return super().from_dict(config_dict, **kwargs)
        made = dict(config_dict)
        for name, supported in _SUPPORTED.items():
            value = made.pop(name, supported)
            if value != supported:
                raise ModelError(
                    f"{name} {value!r} in config.json is not {supported!r}.",
                    "Use a checkpoint of the layout of allenai/Molmo-7B-D-0924.",
                )
        rows = made.get("embedding_size") or made["vocab_size"]
        made |= {
            "embedding_size": rows,
            # The published width is that of both halves of the first matrix.
            "intermediate_size": made["intermediate_size"] // 2,
            "rms_norm_eps": made.pop("layer_norm_eps"),
            "tie_word_embeddings": False,
            "vocab_size": rows,
        }
        made.setdefault("image_token_id", rows + _PATCH)
        return super().from_dict(made, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the tower's configuration."""
        if not isinstance(self.vision_config, CLIPVisionConfig):
            self.vision_config = CLIPVisionConfig(**{**_TOWER, **(self.vision_config or {})})
        super().__post_init__(**kwargs)
