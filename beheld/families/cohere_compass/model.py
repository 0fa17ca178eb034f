"""North Micro Vision: Qwen3-VL's tower; its logits are scaled."""

from __future__ import annotations

from dataclasses import replace

from beheld.families.qwen3_vl import model

MODEL = replace(model.MODEL, plain_head=False)
