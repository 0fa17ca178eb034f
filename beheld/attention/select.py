"""Which attention backend to use: the only decision on hardware, made once and logged with its reason."""

from __future__ import annotations

from beheld.attention.backend import AttentionBackend
from beheld.attention.torch_ref import TorchBackend
from beheld.core.errors import ConfigError
from beheld.utils.log import get_logger

logger = get_logger(__name__)


def select(device: str, wanted: str | None) -> AttentionBackend:
    """The backend for `device` ("cpu" or "cuda"); `wanted` names one outright.

    Raises:
        ConfigError: there is no backend of that name for this device.
    """
    if wanted not in (None, TorchBackend.name):
        raise ConfigError(
            f"There is no attention backend {wanted!r} for {device}.", "Known: 'torch'.", param="attention_backend"
        )
    logger.debug("Using the attention backend 'torch': the device is %s.", device)
    return TorchBackend()
