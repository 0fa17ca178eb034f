"""What is asked about devices before torch is loaded: on the command line, in help, and for new processes."""

from __future__ import annotations

import threading

from beheld.platform import cuda_driver
from beheld.platform.driver import Driver

DRIVERS: tuple[Driver, ...] = (cuda_driver.DRIVER,)
"""Those of all platforms besides the CPU, in the order in which "auto" tries them."""


def device_names() -> tuple[str, ...]:
    """The names that the option `device` takes, as torch has them."""
    # Vendors may share a name of torch's.
    return tuple(dict.fromkeys(("cpu", *(driver.name for driver in DRIVERS))))


def device_words() -> str:
    """The values of the option `device`, for help."""
    return " or ".join(f"`{name}`" for name in device_names())


def driver_of(wanted: str | None) -> Driver | None:
    """The first driver on this machine of devices that `wanted` names (None, or "auto": any); None if there is none."""
    fitting = (driver for driver in DRIVERS if wanted in (None, "auto", driver.name))
    return next((driver for driver in fitting if driver.is_loaded()), None)


def has_accelerator(wanted: str | None) -> bool:
    """True if this machine has a driver of devices that `wanted` names; see `driver_of`."""
    return driver_of(wanted) is not None


def seeing_none() -> dict[str, str]:
    """The variables with which a new process sees no accelerator, of whatever vendor."""
    return {name: value for driver in DRIVERS for name, value in driver.seeing(()).items()}


def variable_prefixes() -> tuple[str, ...]:
    """How the names of variables begin that libraries of accelerators read."""
    return tuple(prefix for driver in DRIVERS for prefix in driver.prefixes)


def begin_driver(wanted: str | None) -> None:
    """Start an accelerator's driver in a thread, where `has_accelerator`; see `Driver.begin`."""
    driver = driver_of(wanted)
    if driver is not None:
        threading.Thread(target=driver.begin, name="beheld-driver", daemon=True).start()
