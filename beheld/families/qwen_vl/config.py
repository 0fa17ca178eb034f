"""Qwen-VL's configuration: Qwen-1's and its tower's under the names of Qwen 2 and CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CLIPVisionConfig, Qwen2Config

from beheld.core.errors import ModelError

# Settings of Qwen-1 that its checkpoints with images do not change.
_SUPPORTED = {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True}
# What follows `<img>`: its end, then the token of one embedding.
_PAD = 2
# Settings that the two parts need.
_TEXT = ("hidden_size", "intermediate_size", "layer_norm_epsilon", "num_attention_heads", "rotary_emb_base")
_VISUAL = ("heads", "image_size", "image_start_id", "layers", "mlp_ratio", "output_dim", "patch_size", "width")
_OTHER = "Use a checkpoint of the layout of Qwen/Qwen-VL."


class QwenVLConfig(Qwen2Config):
    """config.json as published; `from_dict` reads it.

    Attributes:
        vision_config: the tower; `visual` in config.json.
        num_queries: embeddings of an image, a square number.
        image_token_id: the token `<imgpad>`.
    """

    model_type = "qwen"
    sub_configs = {"vision_config": CLIPVisionConfig}  # noqa: RUF012
    vision_config: Any = None
    num_queries: int = 256
    image_token_id: int = 151859

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content, as published or as written by transformers.

        Raises:
            ModelError: the model has no images, or a setting is missing or has an unsupported value; it is named.
        """
        if "vision_config" in config_dict:
            return super().from_dict(config_dict, **kwargs)
        made = dict(config_dict)
        visual = made.pop("visual", None)
        if not visual:
            name = (made.get("architectures") or ["QWenLMHeadModel"])[0]
            raise ModelError(
                f"{name} (model type 'qwen') without the entry `visual` in config.json reads no images: it is not "
                "Qwen-VL, and beheld has no definition of it.",
                "`beheld models` lists the families that run.",
            )
        _require("visual.", visual, _VISUAL)
        _require("", made, _TEXT)
        hidden, heads = made["hidden_size"], made["num_attention_heads"]
        supported = {**_SUPPORTED, "kv_channels": hidden // heads}
        for name, expected in supported.items():
            _check(name, made.pop(name, expected), expected)
        _check("visual.output_dim", visual["output_dim"], hidden)
        queries = visual.get("n_queries", 256)
        _check("visual.n_queries", queries, round(queries**0.5) ** 2)
        longest = made.get("max_position_embeddings", 8192)
        if made.pop("use_dynamic_ntk", True) or made.pop("use_logn_attn", True):
            # From here on the published code changes the rotary base by the prompt's length, and scales queries.
            longest = min(longest, made.get("seq_length", longest))
        made |= {
            "image_token_id": visual["image_start_id"] + _PAD,
            # The published width is that of both halves of the first matrix.
            "intermediate_size": made["intermediate_size"] // 2,
            "max_position_embeddings": longest,
            "num_key_value_heads": heads,
            "num_queries": queries,
            "rms_norm_eps": made.pop("layer_norm_epsilon"),
            "rope_theta": made.pop("rotary_emb_base"),
            "vision_config": {
                "hidden_act": "gelu",
                "hidden_size": visual["width"],
                "image_size": visual["image_size"],
                "intermediate_size": int(visual["width"] * visual["mlp_ratio"]),
                "layer_norm_eps": 1e-6,
                "num_attention_heads": visual["heads"],
                "num_hidden_layers": visual["layers"],
                "patch_size": visual["patch_size"],
            },
        }
        return super().from_dict(made, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the tower's configuration."""
        if not isinstance(self.vision_config, CLIPVisionConfig):
            self.vision_config = CLIPVisionConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)


def _require(where: str, entries: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(entries, Mapping) or not isinstance(entries.get(name), int | float):
            raise ModelError(f"config.json has no number for {where}{name}.", _OTHER)


def _check(name: str, value: Any, supported: Any) -> None:
    if value != supported:
        raise ModelError(f"{name} {value!r} in config.json is not {supported!r}.", _OTHER)
