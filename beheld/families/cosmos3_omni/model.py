"""Cosmos 3 Omni: Qwen3-VL's tower and layers."""

from __future__ import annotations

from beheld.families.qwen3_vl.model import MODEL

__all__ = ["MODEL"]
