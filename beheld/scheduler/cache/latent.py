"""Latent attention: a latent and a rotary key of every position, from which all heads' keys and values follow."""

from __future__ import annotations

from beheld.scheduler.cache.full import FullGroup


class LatentGroup(FullGroup):
    """Every position is kept until its sequence ends, as for full attention; it only takes fewer bytes."""
