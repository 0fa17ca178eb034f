"""xLSTM: refused; see FAMILY.refused."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("xlstm",),
    refused="its layers keep a matrix of memory and its normalizer (mLSTM), which no group of the cache keeps yet",
)
