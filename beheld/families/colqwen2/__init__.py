"""ColQwen2: Qwen2-VL that gives a vector for each token of a query or of a page's image."""

from __future__ import annotations

from typing import Any

from beheld.families._shared.late.config import pools
from beheld.families.family import Family


def placeholders(config: Any) -> dict[str, int]:
    """Return the id of an image's embeddings."""
    return {"image": int(config.vlm_config.image_token_id)}


FAMILY = Family(model_types=("colqwen2",), placeholders=placeholders, pools=pools)
