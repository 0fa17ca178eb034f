"""InternVL's model: transformers' own, whose weights have other names in this layout."""

from __future__ import annotations

from beheld.families._shared.intern.modeling import InternChatForConditionalGeneration

__all__ = ["InternChatForConditionalGeneration"]
