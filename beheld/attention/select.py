"""Which attention backend to use: decided once and logged with its reason."""

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


def select(platform: Platform, wanted: str | None, both_ways: str = "nowhere") -> AttentionBackend:
    """The backend for a platform; `wanted` names one outright.

    `both_ways` is ModelInfo's: where several ranges see each other, "joint", the kernels cannot leave out what lies
    between them.

    Raises:
        ConfigError: there is no backend of that name for this platform.
    """
    joint = both_ways == "joint"
    known = ("torch",) if joint else platform.attention_backends
    flash = _flash(platform) if "flash" in known and platform.has_triton else None
    if flash is None:
        known = tuple(name for name in known if name != "flash")
    if wanted not in (None, *known):
        use = " and media that see each other" if joint else ""
        raise ConfigError(
            f"There is no attention backend {wanted!r} for {platform.name}{use}.",
            f"Known: {', '.join(map(repr, known))}.",
            param="attention_backend",
        )
    name, reason = wanted or known[0], "it was asked for" if wanted else f"the device is {platform.name}"
    if name == "flash" and not wanted:
        reason = "FlashAttention-3 is installed, and Triton does what it does not"
    if joint and not wanted:
        reason = "media of one prompt see each other, wherever they stand"
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
    """What computes attention within the windows of towers that pack them: "flash", "triton" or "torch".

    As for the text, `wanted` names it outright; that there is such a backend is for `select` to say.
    """
    if wanted == "torch" or not platform.has_triton:
        return "torch"
    return "flash" if wanted in (None, "flash") and _flash(platform) is not None else "triton"


def select_cross(platform: Platform) -> CrossBackend:
    """How layers of a cross group attend on this platform."""
    backend, reason = _cross_of(platform)
    logger.log(
        _level(platform),
        "Cross attention uses the backend %r: %s.",
        backend.name,
        reason,
    )
    return backend


def _level(platform: Platform) -> int:
    """Where there is only one backend, there is little to say."""
    return logging.INFO if len(platform.attention_backends) > 1 else logging.DEBUG


def _flash(platform: Platform) -> Flash | None:
    from beheld.attention.flash import installed

    return installed(platform)


def _cross_of(platform: Platform) -> tuple[CrossBackend, str]:
    """The backend for layers of a cross group, and why it is this one."""
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
