"""The platforms that there are: chosen by a user's option, and found again from a tensor's device."""

from __future__ import annotations

import torch

from beheld.core.errors import ConfigError
from beheld.platform.cpu import Cpu
from beheld.platform.cuda import Cuda
from beheld.platform.platform import Platform

CPU: Platform = Cpu()
# In the order in which "auto" tries them.
_ACCELERATORS: tuple[Platform, ...] = (Cuda(),)
# The device whose sizes are meant where a machine without one plans for it.
ACCELERATOR = _ACCELERATORS[0].name
PLATFORMS: dict[str, Platform] = {platform.name: platform for platform in (CPU, *_ACCELERATORS)}


def platform_of(device: torch.device | str) -> Platform:
    """The platform of a device, or of a device's name as in EngineConfig."""
    return PLATFORMS[device if isinstance(device, str) else device.type]


def choose(wanted: str) -> Platform:
    """The platform for the option `device`: "auto" takes an accelerator if there is one.

    Raises:
        ConfigError: there is no platform of that name, or this machine has none.
    """
    if wanted == "auto":
        return accelerator() or CPU
    platform = PLATFORMS.get(wanted)
    if platform is None:
        known = ", ".join(map(repr, ("auto", *PLATFORMS)))
        raise ConfigError(f"There is no device {wanted!r}.", f"Known: {known}.", param="device")
    if not platform.is_available():
        reason, remedy = platform.unavailable()
        raise ConfigError(reason, remedy, param="device")
    return platform


def accelerator() -> Platform | None:
    """The first platform besides the CPU that this process can use; None if there is none."""
    return next((platform for platform in _ACCELERATORS if platform.is_available()), None)
