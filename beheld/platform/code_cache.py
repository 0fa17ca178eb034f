"""Machine code of compiled functions, kept on disk from one start to the next.

LLVM takes 0.3 s of processor time for the functions of a small model; reading its code back takes a millisecond. A file
holds the code after its SHA-256, and its name says what it was made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from beheld.utils import env
from beheld.utils.log import get_logger

logger = get_logger(__name__)

OFF = "0"
# Files of other versions or other CPUs go first when there are more than so many.
_MOST = 256
_DIGEST_BYTES = hashlib.sha256().digest_size
# Names of keys, and of drafts of them: nothing else in the folder is this module's.
_OWN_NAMES = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}-\w+")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def key_of(parts: Sequence[str]) -> str:
    """Return a name for code that depends on these texts: its source, the compiler and the CPU."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read(key: str) -> bytes | None:
    """Return the code that is kept under a key; None if there is none, or if others than this user could write it."""
    folder = _folder()
    if folder is None:
        return None
    try:
        if not _is_own(os.stat(folder)):
            logger.debug("%s is not read: others than this user may write there.", folder)
            return None
        with open(os.open(folder / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            if not _is_own(os.fstat(file.fileno())):
                return None
            content = file.read()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(key: str, code: bytes) -> None:
    """Keep code under a key, if the folder can be written."""
    folder = _folder()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder.stat()):
            return
        # A new file that nobody else may open, whatever the umask; containers that share a folder share process ids.
        descriptor, draft = tempfile.mkstemp(prefix=f".{key}-", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(draft, folder / key)
        except OSError:
            os.unlink(draft)
            raise
        _bound(folder)
    except OSError as error:
        logger.debug("Compiled code is not kept: %s.", error)


def _folder() -> Path | None:
    named = env.CODE_CACHE()
    if named == OFF:
        return None
    with contextlib.suppress(RuntimeError):
        # Without a home there is no folder.
        return Path(named).expanduser()
    return None


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_MAY_WRITE


def _bound(folder: Path) -> None:
    """Remove the oldest files of code, if there are too many; the user may have named a folder with other files."""
    files = [file for file in folder.iterdir() if _OWN_NAMES.fullmatch(file.name)]
    if len(files) > _MOST:
        for file in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) - _MOST]:
            file.unlink(missing_ok=True)
