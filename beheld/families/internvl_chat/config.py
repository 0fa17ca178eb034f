"""InternVL's configuration."""

from __future__ import annotations

from beheld.families._shared.intern.config import InternChatConfig

__all__ = ["InternChatConfig"]
