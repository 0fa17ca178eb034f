"""Cosmos 3 Omni: features of several tower layers enter the first layers of its language model."""

from __future__ import annotations

from beheld.families.qwen3_vl.inputs import INPUTS

__all__ = ["INPUTS"]
