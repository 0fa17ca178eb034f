"""Gemma 4 without towers: Gemma 4's prompts."""

from __future__ import annotations

from dataclasses import replace

from beheld.families.gemma4 import inputs

INPUTS = replace(inputs.INPUTS, speech=None)
