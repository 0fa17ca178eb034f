"""InternVL's configuration."""

from __future__ import annotations

from beheld.families._shared.intern_config import InternChatConfig

__all__ = ["InternChatConfig"]
