"""Which attention backend to use: the only decision on hardware, made once and logged with its reason."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from beheld.attention.backend import AttentionBackend
from beheld.attention.cross import CrossBackend, SDPACross, StackedCross
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ConfigError
from beheld.utils.log import get_logger
from beheld.utils.triton import HAS_TRITON

if TYPE_CHECKING:
    from beheld.attention.flash import Flash

logger = get_logger(__name__)


def select(device: str, wanted: str | None, both_ways: str = "nowhere") -> AttentionBackend:
    """The backend for `device` ("cpu" or "cuda"); `wanted` names one outright.

    `both_ways` is ModelInfo's: where several ranges see each other, "joint", the kernels cannot leave out what lies
    between them.

    Raises:
        ConfigError: there is no backend of that name for this device.
    """
    joint = both_ways == "joint"
    known = ("torch",) if device == "cpu" or joint else ("triton", "torch")
    flash = _flash() if "triton" in known and HAS_TRITON else None
    if flash is not None:
        known = ("flash", *known)
    if wanted not in (None, *known):
        use = " and media that see each other" if joint else ""
        raise ConfigError(
            f"There is no attention backend {wanted!r} for {device}{use}.",
            f"Known: {', '.join(map(repr, known))}.",
            param="attention_backend",
        )
    name, reason = wanted or known[0], "it was asked for" if wanted else f"the device is {device}"
    if name == "flash" and not wanted:
        reason = "FlashAttention-3 is installed, and Triton does what it does not"
    if joint and not wanted:
        reason = "media of one prompt see each other, wherever they stand"
    if name == "triton" and not HAS_TRITON:
        if wanted:
            raise ConfigError(
                "The attention backend 'triton' needs the package triton.",
                "pip install triton, or attention_backend='torch'.",
                param="attention_backend",
            )
        name, reason = "torch", "the package triton is not installed: expect a slow GPU"
    # On a CPU there is nothing to tell: it is the only one.
    logger.log(logging.DEBUG if device == "cpu" else logging.INFO, "Using the attention backend %r: %s.", name, reason)
    return _make(name, flash)


def select_tower(device: str, wanted: str | None) -> str:
    """What computes attention within the windows of towers that pack them: "flash", "triton" or "torch".

    As for the text, `wanted` names it outright; that there is such a backend is for `select` to say.
    """
    if device == "cpu" or wanted == "torch" or not HAS_TRITON:
        return "torch"
    return "flash" if wanted in (None, "flash") and _flash() is not None else "triton"


def select_cross(device: str) -> CrossBackend:
    """How layers of a cross group attend on `device`."""
    backend, reason = _cross_of(device)
    logger.log(
        logging.DEBUG if device == "cpu" else logging.INFO,
        "Attention to what stands beside the text uses the backend %r: %s.",
        backend.name,
        reason,
    )
    return backend


def _flash() -> Flash | None:
    from beheld.attention.flash import installed

    return installed()


def _cross_of(device: str) -> tuple[CrossBackend, str]:
    """The backend for layers of a cross group, and why it is this one."""
    if device == "cpu":
        return StackedCross(), "the device is cpu"
    if not HAS_TRITON:
        return SDPACross(), "the package triton is not installed"
    from beheld.attention.triton_cross import TritonCross

    return TritonCross(), f"the device is {device}"


def _make(name: str, flash: Flash | None) -> AttentionBackend:
    if name == "torch":
        return TorchBackend()
    if name == "flash":
        from beheld.attention.flash import FlashBackend

        assert flash is not None
        return FlashBackend(flash)
    from beheld.attention.triton_paged import TritonBackend

    return TritonBackend()
