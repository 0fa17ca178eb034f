"""Which models ranks gain nothing from sharing, as far as their configuration tells."""

from __future__ import annotations

from beheld.core.config import ModelInfo


def unshared(info: ModelInfo) -> str | None:
    """Return why every rank would hold all of a model, in words; None if ranks share it."""
    if info.pooler is not None and info.pooler.encodes:
        return "every one would compute all of an encoder"
    return None
