"""H2OVL's configuration: InternVL's, with other language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from beheld.families._shared.intern.config import InternChatConfig


class H2OVLChatConfig(InternChatConfig):
    """A configuration in the published layout."""

    model_type = "h2ovl_chat"
    texts: ClassVar[Mapping[str, str]] = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
