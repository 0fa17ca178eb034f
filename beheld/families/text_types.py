"""The types of text models whose answers the census compares with transformers' (tests/census.py); see docs/models.md.

It is a list of what was found, and decides nothing.
"""

from __future__ import annotations

TEXT_TYPES: tuple[str, ...] = ()
