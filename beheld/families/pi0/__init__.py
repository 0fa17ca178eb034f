"""Pi-0, which cannot be run: it moves a robot."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("pi0",),
    refused="it answers with the motions of a robot, and no text",
)
