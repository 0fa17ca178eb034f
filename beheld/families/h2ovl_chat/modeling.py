"""H2OVL's model: transformers' InternVL, whose weights have other names in this layout."""

from __future__ import annotations

from transformers import InternVLForConditionalGeneration

from beheld.families._shared.intern.modeling import reads_chat_layout
from beheld.families.h2ovl_chat.config import H2OVLChatConfig


@reads_chat_layout
class H2OVLChatForConditionalGeneration(InternVLForConditionalGeneration):
    """transformers' InternVL that reads the published layout."""

    config_class = H2OVLChatConfig
