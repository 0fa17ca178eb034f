"""The working directory, which may have been deleted while a process is in it."""

from __future__ import annotations

import os


def existing() -> str | None:
    """The directory for a new process: None for this process's own; "/" if that was deleted.

    Libraries that ask where they are end the process if there is no answer, as torch's do when they are loaded.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None
