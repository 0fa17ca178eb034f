"""ShieldGemma 2: Gemma 3 that judges an image by a policy, which its chat template puts into the prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from beheld.families.family import IMAGE, Family, KnownCheckpoint


def _gemma3(raw: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Convert the configuration of the classifier around Gemma 3 into Gemma 3's."""
    return "gemma3", {name: copy.deepcopy(value) for name, value in raw.items() if name != "model_type"}


FAMILY = Family(
    model_types=("shieldgemma2",),
    architectures=("ShieldGemma2ForImageClassification",),
    tested=(
        KnownCheckpoint(
            "shieldgemma2",
            "ShieldGemma2ForImageClassification",
            "google/shieldgemma-2-4b-it",
            IMAGE,
            "answers Yes or No to the policy that the message states in full; policies are not known by name",
            by_census=True,
        ),
    ),
    convert={"shieldgemma2": _gemma3},
    both_ways="media",
)
