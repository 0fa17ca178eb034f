"""The configuration of InternLM2 in its publisher's layout: a Llama's, with a name of its own for biases."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from beheld.families._shared.intern.config import internlm2_text, refuse_scaled


class InternLM2Config(LlamaConfig):
    """A configuration of a Llama; `from_dict` reads config.json as published."""

    model_type = "internlm2"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the configuration of config.json's content.

        Raises:
            ModelError: its rotary embeddings are scaled in a way that is not built.
        """
        refuse_scaled(cls.model_type, config_dict)
        made = internlm2_text(config_dict) | {"architectures": config_dict.get("architectures")}
        dtype = config_dict.get("torch_dtype", config_dict.get("dtype"))
        return super().from_dict(made if dtype is None else made | {"dtype": dtype}, **kwargs)
