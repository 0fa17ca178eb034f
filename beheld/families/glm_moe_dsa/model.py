"""GLM-5 runs where its indexer picks all positions."""

from __future__ import annotations

from beheld.families._shared.indexed.model import INDEXED

MODEL = INDEXED
