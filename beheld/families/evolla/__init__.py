"""Evolla, which cannot be run."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("evolla",),
    refused="it reads proteins, which no input here can hold",
)
