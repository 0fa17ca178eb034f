"""Passes in which no library rounds float32 operands."""

from __future__ import annotations

from beheld.models.surgery.operation import Changes, Target
from beheld.platform.registry import platform_of


def keep_float32_exact(target: Target, changes: Changes) -> None:
    """Let passes run with the platform's settings for exact float32."""
    target.around.append(platform_of(target.config.device).exact_float32)
    changes.undo_with(target.around.pop)
