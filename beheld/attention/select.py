"""Selects the attention backend, once, and gives the reason for the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from beheld.attention.backend import AttentionBackend
from beheld.attention.cross import CrossBackend, SDPACross, StackedCross
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ConfigError
from beheld.platform.platform import Platform
from beheld.utils.log import get_logger

if TYPE_CHECKING:
    from beheld.attention.flash import Flash

logger = get_logger(__name__)


def select(
    platform: Platform, wanted: str | None, both_ways: str = "nowhere", plain_attention: str = ""
) -> AttentionBackend:
    """Return the backend for a platform; `wanted` selects one by name.

    `both_ways` and `plain_attention` are ModelInfo's. With "joint", the kernels cannot skip what lies between two
    ranges.

    Raises:
        ConfigError: the platform has no backend of that name.
    """
    if both_ways == "joint":
        plain_attention = "media of one prompt see each other, wherever they stand"
    known = ("torch",) if plain_attention else platform.attention_backends
    flash = _flash(platform) if "flash" in known and platform.has_triton else None
    if flash is None:
        known = tuple(name for name in known if name != "flash")
    if wanted not in (None, *known):
        use = f" and this model: {plain_attention}" if plain_attention else ""
        raise ConfigError(
            f"The attention backend {wanted!r} does not exist for {platform.name}{use}.",
            f"Known: {', '.join(map(repr, known))}.",
            param="attention_backend",
        )
    name, reason = wanted or known[0], "it was asked for" if wanted else f"the device is {platform.name}"
    if name == "flash" and not wanted:
        reason = "FlashAttention-3 is installed, and Triton does what it does not"
    if plain_attention and not wanted:
        reason = plain_attention
    if name == "triton" and not platform.has_triton:
        if wanted:
            raise ConfigError(
                "The attention backend 'triton' needs the package triton.",
                "pip install triton, or attention_backend='torch'.",
                param="attention_backend",
            )
        name, reason = "torch", "the package triton is not installed: expect a slow GPU"
    logger.log(_level(platform), "Using the attention backend %r: %s.", name, reason)
    return _make(name, flash, platform)


def select_tower(platform: Platform, wanted: str | None) -> str:
    """Return what computes attention within a tower's windows: "flash", "triton" or "torch".

    `wanted` selects one by name, as for text; `select` checks that it exists.
    """
    if wanted == "torch" or not platform.has_triton:
        return "torch"
    return "flash" if wanted in (None, "flash") and _flash(platform) is not None else "triton"


def select_cross(platform: Platform) -> CrossBackend:
    """Return the backend for layers of a cross group on this platform."""
    backend, reason = _cross_of(platform)
    logger.log(
        _level(platform),
        "Cross attention uses the backend %r: %s.",
        backend.name,
        reason,
    )
    return backend


def _level(platform: Platform) -> int:
    """Return the log level: DEBUG where the platform has only one backend."""
    return logging.INFO if len(platform.attention_backends) > 1 else logging.DEBUG


def _flash(platform: Platform) -> Flash | None:
    from beheld.attention.flash import installed

    return installed(platform)


def _cross_of(platform: Platform) -> tuple[CrossBackend, str]:
    """Return the backend for layers of a cross group, and the reason for it."""
    if platform.synchronous:
        return StackedCross(), f"the device is {platform.name}"
    if not platform.has_triton:
        return SDPACross(), "the package triton is not installed"
    from beheld.attention.triton_cross import TritonCross

    return TritonCross(), f"the device is {platform.name}"


def _make(name: str, flash: Flash | None, platform: Platform) -> AttentionBackend:
    if name == "torch":
        return TorchBackend()
    if name == "flash":
        from beheld.attention.flash import FlashBackend

        assert flash is not None
        return FlashBackend(flash, platform)
    from beheld.attention.triton_paged import TritonBackend

    return TritonBackend()
