"""The towers of a model alone, in the caller's process."""

from __future__ import annotations

from beheld.runner.towers import Towers

__all__ = ["Towers"]
