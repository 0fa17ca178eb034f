"""Families with a quirk that transformers' seams do not carry, one small file each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from beheld.core.plan import EncodeItem

# One tower call: modality (or "embeds" for embeddings given as input), indices of its items, keyword arguments.
TowerCall = tuple[str, list[int], dict[str, Any]]
CombineRule = Callable[[Sequence[EncodeItem]], list[TowerCall]]

_COMBINE = {"llava_next": "anyres", "llava_onevision": "anyres", "llava_next_video": "anyres"}


def combine_rule(model_type: str) -> CombineRule:
    """How items of this family share a tower call."""
    name = _COMBINE.get(model_type, "plain")
    module = importlib.import_module(f"beheld.models.families.{name}")
    rule: CombineRule = module.combine
    return rule
