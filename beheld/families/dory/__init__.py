"""Dory: refused; see FAMILY.refused."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("dory",),
    refused="its middle layers compute several times for each token, each time with keys and values of their own, and "
    "a layer has one cache here",
)
