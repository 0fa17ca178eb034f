"""The folder in which ranks of one host meet: it is removed when they end, or by a later start if nothing else did."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from beheld.utils.log import get_logger

logger = get_logger(__name__)

_PREFIX = "beheld-ranks-"
# Held locked by the first rank's process. The kernel unlocks it however that ends, also in another container.
_LOCK = "lock"
# A folder that is younger may not be locked yet.
_YOUNG_S = 60.0


class RankFolder:
    """A new folder, readable by this user alone; those of processes that are gone are removed first.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        _clear(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: int | None = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks. Nothing then removes the folder of a process that is killed.
            logger.debug("%s cannot be locked: %s", self.path, error)
            (self.path / _LOCK).unlink()

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _clear(parent: Path) -> None:
    """Remove the folders of this user's processes that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid() or time.time() - folder.lstat().st_mtime < _YOUNG_S:
                continue
            # Without the file it is of a process whose end nobody can see.
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Its process lives.
            continue
        finally:
            os.close(lock)
