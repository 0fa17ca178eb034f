"""NVLM-D's configuration: InternVL's around Qwen2, which config.json names by its class alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from beheld.families._shared.intern.config import InternChatConfig


class NVLMConfig(InternChatConfig):
    """A configuration in the published layout."""

    model_type = "NVLM_D"
    texts: ClassVar[Mapping[str, str]] = {"Qwen2ForCausalLM": "qwen2"}
