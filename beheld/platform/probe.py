"""What is asked about devices before torch is loaded: on the command line, in help, and for new processes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

DEVICES = ("cpu", "cuda")
"""The names that the option `device` takes, as torch has them."""

_DRIVERS = (Path("/dev/nvidiactl"),)
# A driver has a file for each of its devices.
_DEVICE_FILES = "nvidia[0-9]*"
# The variable that lists the devices that a process sees.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The driver's library, and its function that finds the devices. Calling it again costs nothing.
_LIBRARY, _INIT = "libcuda.so.1", "cuInit"


def device_words() -> str:
    """The values of the option `device`, for help."""
    return " or ".join(f"`{name}`" for name in DEVICES)


def has_accelerator(wanted: str | None) -> bool:
    """True if `wanted` (None, or "auto": any) is not the CPU, and a driver of an accelerator is loaded."""
    return wanted != "cpu" and any(driver.exists() for driver in _DRIVERS)


def num_accelerators() -> int | None:
    """The accelerators of this machine, whether or not this process sees them; None if that is unknown."""
    return len(list(Path("/dev").glob(_DEVICE_FILES))) or None


def visible_accelerators(environment: Mapping[str, str]) -> list[str] | None:
    """The names of the accelerators that a process with these variables sees; None: all."""
    listed = environment.get(_VISIBLE)
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


def seeing(names: Sequence[str]) -> dict[str, str]:
    """The variables with which a new process sees these accelerators and no others."""
    return {_VISIBLE: ",".join(names)}


def begin_driver(wanted: str | None) -> None:
    """Start an accelerator's driver in a thread, where `has_accelerator`: it takes seconds in which Python goes on.

    Whatever fails here, torch reports when it does the same.
    """
    if has_accelerator(wanted):
        threading.Thread(target=_begin, name="beheld-driver", daemon=True).start()


def _begin() -> None:
    with suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(_LIBRARY), _INIT)(0)
