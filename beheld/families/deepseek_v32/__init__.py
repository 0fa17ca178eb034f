"""DeepSeek-V3.2: text only; DeepSeek-V3 with an indexer, as long as that picks all positions."""

from __future__ import annotations

from beheld.families._shared.indexed.config import dense_up_to
from beheld.families.family import Family

FAMILY = Family(
    model_types=("deepseek_v32",), dense_up_to=dense_up_to, calls=("deepseek_v32", "deepseek_v3"), reasoning=("think",)
)
