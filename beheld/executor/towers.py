"""Offers runner/towers.py to the engine, which does not import the runner."""

from __future__ import annotations

from beheld.runner.towers import Towers

__all__ = ["Towers"]
