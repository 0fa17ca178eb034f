"""A.X-K2: text only; latent attention with gates, experts, and an indexer, as long as that picks all positions."""

from __future__ import annotations

from beheld.families._shared.indexed.config import dense_up_to
from beheld.families.family import Family

FAMILY = Family(model_types=("axk2",), dense_up_to=dense_up_to)
