"""MiniCPM-V 4.6 and 4.7: layers with linear attention."""

from __future__ import annotations

from beheld.families.family import Family

FAMILY = Family(
    model_types=("minicpmv4_6", "minicpmv4_7"),
    refused="some of its layers are linear attention, for which there is no cache",
)
