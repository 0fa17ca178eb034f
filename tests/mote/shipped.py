"""The embedded model as transformers loads it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from beheld import mote


@cache
def processor() -> Any:
    return AutoProcessor.from_pretrained(mote.path())


@cache
def model() -> Any:
    return Qwen2VLForConditionalGeneration.from_pretrained(mote.path(), dtype=torch.float32).eval()
