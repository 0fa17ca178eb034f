"""The configuration of models with DeepSeek's text and images in views.

config.json has `language_config`, `vision_config` and `projector_config`; the class has `text_config`. The text has
ordinary attention, or latent attention (MLA) with the experts of DeepSeek-V2 or of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig

from beheld.core.errors import ModelError

# Setting of the text -> the published code's value where config.json has none.
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1407,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "num_attention_heads": 32,
    "num_experts_per_tok": None,
    "num_hidden_layers": 30,
    "num_key_value_heads": 32,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
# The same of a text with latent attention.
_LATENT: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "norm_topk_prob": False,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_COUNTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
# Setting -> the one value that is supported, and the published code's where config.json has none.
_TEXT_SUPPORTED: dict[str, tuple[Any, Any]] = {"rope_scaling": (None, None), "tie_word_embeddings": (False, False)}
# How experts are chosen in DeepSeek-V2, and, with latent attention, in DeepSeek-V3.
_GREEDY: dict[str, tuple[Any, Any]] = {
    "norm_topk_prob": (False, False),
    "scoring_func": ("softmax", "softmax"),
    "topk_method": ("greedy", "greedy"),
}
_CORRECTED: dict[str, tuple[Any, Any]] = {
    "n_group": (1, None),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_group": (1, None),
    "topk_method": ("noaux_tc", "greedy"),
}
_SUPPORTED: dict[str, tuple[Any, Any]] = {"tile_tag": ("2D", None), "global_view_pos": ("head", "head")}


class PartsConfig(PreTrainedConfig):
    """A configuration of parts, each of which may be given as a mapping."""

    sub_configs: ClassVar[dict[str, Any]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the configurations of the parts."""
        for name, kind in self.sub_configs.items():
            if not isinstance(getattr(self, name), PreTrainedConfig):
                setattr(self, name, kind(**(getattr(self, name) or {})))
        super().__post_init__(**kwargs)


class ViewsConfig(PartsConfig):
    """A configuration in the published layout; `from_dict` reads config.json.

    Attributes:
        example: the repository whose layout is supported.
        named: the class that config.json may name.
        text_config: the text model.
        vision_config: the tower.
        projector_config: settings of the projector.
        image_token_id: of `<image>`; the tokenizer's files name it, see Family.placeholder_tokens.
    """

    example: ClassVar[str]
    named: ClassVar[str]
    # Whether the text may have latent attention.
    latent: ClassVar[bool] = False
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": DeepseekOcr2TextConfig}
    text_config: Any = None
    vision_config: Any = None
    projector_config: Any = None
    image_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Make the configuration of the text by its model type, and those of the other parts."""
        if isinstance(self.text_config, Mapping):
            given = dict(self.text_config)
            kind = _TEXT_KINDS.get(given.pop("model_type", DeepseekOcr2TextConfig.model_type), DeepseekOcr2TextConfig)
            self.text_config = kind(**given)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content, as published or as written by transformers.

        Raises:
            ModelError: another model has this type, or a setting is not supported; it is named.
        """
        made = cls._converted(config_dict) if "language_config" in config_dict else config_dict
        return super().from_dict(made, **kwargs)

    @classmethod
    def _converted(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        names = raw.get("architectures") or [cls.named]
        if cls.named not in names:
            raise cls.refused(f"is of {names[0]}, which shares the model type and is not supported")
        cls.check(raw, _SUPPORTED)
        text = cls._text(raw["language_config"])
        projector = cls.projector(raw.get("projector_config") or {})
        if projector["n_embed"] != text["hidden_size"]:
            raise cls.refused(f"has a projector to {projector['n_embed']}, and a text of {text['hidden_size']}")
        made = {
            "architectures": list(names),
            "model_type": cls.model_type,
            "projector_config": projector,
            "text_config": text,
            "tie_word_embeddings": False,
            "vision_config": cls.vision(raw.get("vision_config") or {}),
        }
        dtype = raw.get("torch_dtype", raw.get("dtype"))
        return made if dtype is None else made | {"dtype": dtype}

    @classmethod
    def vision(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tower's settings for its class; a subclass defines it."""
        raise NotImplementedError

    @classmethod
    def projector(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the projector's settings, `n_embed` among them; a subclass defines it."""
        raise NotImplementedError

    @classmethod
    def check(cls, raw: Mapping[str, Any], supported: Mapping[str, tuple[Any, Any]], entry: str = "") -> None:
        """Refuse a setting of config.json that has another than its supported value.

        Raises:
            ModelError: names it.
        """
        for name, (value, absent) in supported.items():
            given = raw.get(name, absent)
            if given != value:
                raise cls.refused(f"has {entry}{name} {given!r}; only {value!r} is supported")

    @classmethod
    def refused(cls, what: str) -> ModelError:
        """Return the error that says what of config.json is not supported."""
        return ModelError(f"config.json {what}.", f"Use a checkpoint of the layout of {cls.example}.")

    @classmethod
    def _text(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        kind = raw.get("model_type", DeepseekV2Config.model_type)
        if kind not in _TEXT_KINDS:
            raise cls.refused(f"has a text of the model type {kind!r}; known are {', '.join(_TEXT_KINDS)}")
        latent = raw.get("use_mla", True)
        if latent and not cls.latent:
            raise cls.refused("has a text with multi-head latent attention (use_mla), which this model never has")
        if not latent and (raw.get("qk_nope_head_dim") or raw.get("qk_rope_head_dim")):
            raise cls.refused("has the sizes of latent attention and use_mla false")
        corrected = latent and raw.get("topk_method") == "noaux_tc"
        cls.check(raw, _TEXT_SUPPORTED | (_CORRECTED if corrected else _GREEDY), "language_config.")
        made = {name: raw.get(name, absent) for name, absent in _TEXT.items()}
        for name in _COUNTS:
            if not made[name]:
                raise cls.refused(f"has no language_config.{name}")
        if latent:
            cls.check(raw, {"moe_layer_freq": (1, 1)}, "language_config.")
            made |= {name: raw.get(name, absent) for name, absent in _LATENT.items()}
            read_by = DeepseekV3Config if corrected else DeepseekV2Config
            return made | {"model_type": read_by.model_type, "n_group": 1, "topk_group": 1}
        first, every = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
        layers = range(made["num_hidden_layers"])
        made["mlp_layer_types"] = ["dense" if n < first or n % every else "sparse" for n in layers]
        return made


_TEXT_KINDS: dict[str, Any] = {
    kind.model_type: kind for kind in (DeepseekOcr2TextConfig, DeepseekV2Config, DeepseekV3Config)
}
