"""What finds one vendor's devices before torch is imported; each platform besides the CPU states its own in a file."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Driver:
    """The driver of one vendor's devices; see `probe.DRIVERS`.

    Attributes:
        name: what torch calls the devices, as the option `device` does.
        file: exists if the driver is loaded.
        device_files: matches the names of the devices' files in /dev, one each.
        visible: the variable that lists the devices that a process sees, between commas.
        library: the driver's library.
        start: its function that finds the devices, whose argument is 0. Calling it again costs nothing.
        prefixes: how the names of variables begin that libraries of these devices read.
    """

    name: str
    file: Path
    device_files: str
    visible: str
    library: str
    start: str
    prefixes: tuple[str, ...] = ()

    def is_loaded(self) -> bool:
        """True if this machine has the driver."""
        return self.file.exists()

    def num_devices(self) -> int | None:
        """The devices of this machine, whether or not this process sees them; None if that is unknown."""
        return len(list(Path("/dev").glob(self.device_files))) or None

    def seen(self, environment: Mapping[str, str]) -> list[str] | None:
        """The names of the devices that a process with these variables sees; None: all."""
        listed = environment.get(self.visible)
        return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]

    def seeing(self, names: Sequence[str]) -> dict[str, str]:
        """The variables with which a new process sees these devices and no others."""
        return {self.visible: ",".join(names)}

    def begin(self) -> None:
        """Start the driver, which takes seconds in which Python goes on; what fails, torch reports later."""
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(self.library), self.start)(0)
