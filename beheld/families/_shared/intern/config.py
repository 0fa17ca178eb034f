"""The configuration of models in InternVL's original layout: InternViT, a projector and a language model.

config.json has `llm_config`, `vision_config` and the settings of tiles; transformers' class has `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import InternVLConfig

from beheld.core.errors import ModelError

# What the classes of the language models read.
_TEXT = (
    *("attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size"),
    *("initializer_range", "intermediate_size", "max_position_embeddings", "max_window_layers", "mlp_bias"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_theta"),
    *("sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size"),
)
# transformers' name of a tower's setting -> the original name, and the original default.
_VISION: dict[str, tuple[str, Any]] = {
    "attention_bias": ("qkv_bias", False),
    "hidden_act": ("hidden_act", "gelu"),
    "hidden_size": ("hidden_size", 3200),
    "image_size": ("image_size", 224),
    "intermediate_size": ("intermediate_size", 12800),
    "layer_norm_eps": ("layer_norm_eps", 1e-6),
    "norm_type": ("norm_type", "rms_norm"),
    "num_attention_heads": ("num_attention_heads", 25),
    "num_channels": ("num_channels", 3),
    "num_hidden_layers": ("num_hidden_layers", 48),
    "patch_size": ("patch_size", 14),
    "use_qk_norm": ("qk_normalization", True),
}
# Setting -> the one value that is supported, and the value that the original code takes where there is none.
_BUILT: dict[str, tuple[Any, Any]] = {
    "ps_version": ("v2", "v1"),
    "select_layer": (-1, -1),
    "pad2square": (False, False),
}
# transformers' class fixes the epsilon of the norms of queries and keys.
_QK_EPS = 1e-6


class InternChatConfig(InternVLConfig):
    """A configuration in the original layout; `from_dict` reads config.json as published.

    Attributes:
        texts: the class name of a language model -> transformers' model type.
    """

    model_type = "internvl_chat"
    texts: ClassVar[Mapping[str, str]] = {
        "InternLM2ForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    }

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content, in the original layout or in transformers'.

        Raises:
            ModelError: the language model or a setting is not supported; it is named.
        """
        made = cls._converted(config_dict) if "llm_config" in config_dict else config_dict
        return super().from_dict(made, **kwargs)

    @classmethod
    def _converted(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        for name, (built, absent) in _BUILT.items():
            if raw.get(name, absent) != built:
                raise _refused(cls.model_type, f"{name} {raw.get(name, absent)!r}; only {built!r} is built")
        vision = _vision(cls, raw)
        ratio = raw.get("downsample_ratio", 0.5)
        patches = (vision["image_size"] // vision["patch_size"]) ** 2
        text = cls._text(raw["llm_config"])
        made = {
            "architectures": raw.get("architectures"),
            "downsample_ratio": ratio,
            "image_seq_length": int(patches * ratio**2),
            "model_type": cls.model_type,
            "projector_hidden_act": "gelu",
            "text_config": text,
            "tie_word_embeddings": text["tie_word_embeddings"],
            "vision_config": vision,
            "vision_feature_layer": -1,
        }
        dtype = raw.get("torch_dtype", raw.get("dtype"))
        return made if dtype is None else made | {"dtype": dtype}

    @classmethod
    def _text(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        named = (raw.get("architectures") or [None])[0]
        kind = cls.texts.get(named)
        if kind is None:
            known = ", ".join(cls.texts)
            raise _refused(
                cls.model_type,
                f"the language model {named!r} (model type {raw.get('model_type')!r}); known are {known}",
            )
        refuse_scaled(cls.model_type, raw)
        own = internlm2_text(raw) if named == "InternLM2ForCausalLM" else text_entries(raw)
        return own | {"model_type": kind}


def internlm2_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of transformers' Llama for the content of InternLM2's own config.json."""
    return text_entries(raw) | {"attention_bias": raw.get("bias", True)}


def text_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' classes of language models read of the content of a config.json."""
    return {"tie_word_embeddings": False} | {name: raw[name] for name in _TEXT if name in raw}


def refuse_scaled(model_type: str, raw: Mapping[str, Any]) -> None:
    """Refuse rotary embeddings that are scaled below `max_position_embeddings`.

    Raises:
        ModelError: names the type.
    """
    scaling = raw.get("rope_scaling") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    # Dynamic scaling begins after max_position_embeddings, which no sequence here exceeds.
    if rope not in ("default", "dynamic"):
        raise _refused(model_type, f"rotary embeddings of the type {rope!r}")


def _vision(cls: type[InternChatConfig], raw: Mapping[str, Any]) -> dict[str, Any]:
    given = raw.get("vision_config") or {}
    made = {ours: given.get(theirs, absent) for ours, (theirs, absent) in _VISION.items()}
    side = raw.get("force_image_size") or made["image_size"]
    if side != made["image_size"]:
        raise _refused(cls.model_type, f"tiles of {side} pixels before a tower for {made['image_size']}")
    if made["use_qk_norm"] and made["layer_norm_eps"] != _QK_EPS:
        raise _refused(cls.model_type, f"norms of queries and keys with the epsilon {made['layer_norm_eps']}")
    # The original tower has no norm after its last layer.
    return made | {"use_mean_pooling": True, "model_type": "internvl_vision"}


def _refused(model_type: str, what: str) -> ModelError:
    return ModelError(
        f"config.json of the model type {model_type!r} has {what}.",
        "Use another version of the model, for example one in transformers' own layout.",
    )
