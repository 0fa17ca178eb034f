"""DBRX: text only, experts; its rotary base stands in its attention's settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from beheld.families.family import Family

_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")


def _dbrx(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Read the rotary base of the published layout, `attn_config.rope_theta`.

    transformers' class looks for it at the top level, and takes 10,000 where the published models have 500,000.
    """
    base = (raw.get("attn_config") or {}).get("rope_theta")
    if base is None or any(raw.get(name) is not None for name in _ROTARY):
        return None
    made = {name: copy.deepcopy(value) for name, value in raw.items() if name not in ("model_type", *_ROTARY)}
    return "dbrx", made | {"rope_parameters": {"rope_theta": base, "rope_type": "default"}}


FAMILY = Family(model_types=("dbrx",), convert={"dbrx": _dbrx})
