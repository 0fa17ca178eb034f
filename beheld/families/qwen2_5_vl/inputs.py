"""Qwen2.5-VL: prompts like Qwen2-VL's."""

from __future__ import annotations

from beheld.families.qwen2_vl.inputs import INPUTS

__all__ = ["INPUTS"]
