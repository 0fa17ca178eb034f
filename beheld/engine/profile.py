"""A record of what the engine's thread computes, by torch's profiler, as a trace for Chrome and Perfetto."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from beheld.core.errors import ParamsError


class Recorder:
    """Records between `start` and `stop`, which one thread calls: the one that computes."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin.

        Raises:
            ParamsError: it has begun.
        """
        from torch.profiler import profile

        if self._profile is not None:
            raise ParamsError("A profile is being recorded.", "Call stop_profile first.")
        self._profile = profile()
        self._profile.start()

    def stop(self, folder: str) -> Path:
        """End, and write the trace into a folder, which is made; returns its file.

        Raises:
            ParamsError: nothing is recorded, or the folder takes no file.
        """
        if self._profile is None:
            raise ParamsError("No profile is being recorded.", "Call start_profile first.")
        made, self._profile = self._profile, None
        made.stop()
        path = Path(folder) / f"beheld-{os.getpid()}-{time.time_ns()}.pt.trace.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParamsError(f"{folder!r} is no folder for profiles.", "Give another.", detail=str(error)) from error
        made.export_chrome_trace(str(path))
        if not path.exists():
            # torch's profiler only prints that it could not write.
            raise ParamsError(f"{folder!r} takes no file.", "Give another folder: BEHELD_PROFILES.")
        return path
