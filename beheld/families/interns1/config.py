"""Intern-S1's configuration: transformers' for InternVL, with other names of model types."""

from __future__ import annotations

from typing import Any

from transformers import InternVLConfig

from beheld.core.errors import ModelError

_TEXTS = ("qwen3",)


class InternS1Config(InternVLConfig):
    """A configuration in the published layout."""

    model_type = "interns1"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content.

        Raises:
            ModelError: the language model is not supported; it is named.
        """
        text, vision = config_dict.get("text_config") or {}, dict(config_dict.get("vision_config") or {})
        if text.get("model_type") not in _TEXTS:
            raise ModelError(
                f"config.json of the model type {cls.model_type!r} has the language model {text.get('model_type')!r}; "
                f"known are {', '.join(_TEXTS)}.",
                "Use another version of the model, for example internlm/Intern-S1-mini.",
            )
        vision["model_type"] = "internvl_vision"
        tied = config_dict.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        return super().from_dict({**config_dict, "vision_config": vision, "tie_word_embeddings": tied}, **kwargs)
