"""What is asked about devices before torch is loaded: on the command line, and in help."""

from __future__ import annotations

from pathlib import Path

DEVICES = ("cpu", "cuda")
"""The names that the option `device` takes, as torch has them."""

_DRIVERS = (Path("/dev/nvidiactl"),)


def device_words() -> str:
    """The values of the option `device`, for help."""
    return " or ".join(f"`{name}`" for name in DEVICES)


def has_accelerator(wanted: str | None) -> bool:
    """True if `wanted` (None, or "auto": any) is not the CPU, and a driver of an accelerator is loaded."""
    return wanted != "cpu" and any(driver.exists() for driver in _DRIVERS)
