"""Keeps the bytecode of libraries that came without it, so that only the first start compiles their sources.

Images are often built so: packages are installed without bytecode (`pip install --no-compile`, `uv pip install`), and
PYTHONDONTWRITEBYTECODE, or a file system that is read only, keeps Python from writing it. Every start then compiles
thousands of modules of torch and transformers, which takes 7 of 12 seconds of imports.

Python's own way for this (`sys.pycache_prefix`) would leave aside what bytecode there is in a part of such an image.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import stat
import sys
import tempfile
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType

from beheld.utils import env

# The largest of the libraries: what was done with it was done with the others.
_LIBRARY = "torch"


def keep_bytecode() -> Path | None:
    """Where it is needed, keep bytecode of what is imported from now on in a folder of our own; the folder, or None.

    Nothing changes where torch has bytecode or Python can write it beside the sources, where the user named a place
    (PYTHONPYCACHEPREFIX), or where others could write the folder or put another in its place: bytecode is code.
    """
    wanted = env.BYTECODE_CACHE()
    if wanted == "0" or sys.pycache_prefix is not None or not _is_missing():
        return None
    # Python's own finder of files, which is the last. What others put before it, to change sources say, stays there.
    places = [place for place, hook in enumerate(sys.path_hooks) if getattr(hook, "__name__", "") == _FINDER]
    expanded = os.path.expanduser(wanted)
    # Nobody's home is known otherwise. What is checked must not be another folder after a change of directory.
    folder = Path(os.path.abspath(expanded))
    if not places or expanded.startswith("~") or not _is_ours(folder):
        return None

    class Loader(_Loader):
        kept = folder

    kinds = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (Loader, SOURCE_SUFFIXES))
    sys.path_hooks[places[-1]] = FileFinder.path_hook(*kinds, (SourcelessFileLoader, BYTECODE_SUFFIXES))
    # Folders that were looked into before have the finders of before.
    sys.path_importer_cache.clear()
    return folder


_FINDER = "path_hook_for_FileFinder"
# In a header of bytecode (PEP 552): it belongs to a source of the hash that follows, which is to be looked at.
_BY_HASH = (0b11).to_bytes(4, "little")


class _Loader(SourceFileLoader):
    """Loads a module from bytecode beside its source, from that in `kept`, or from the source and keeps what it made.

    What is kept may outlive an image whose files all bear one time, so it names the source's hash.
    """

    kept: Path

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code."""
        beside = importlib.util.cache_from_source(self.path)
        if os.path.exists(beside):
            return super().get_code(fullname)
        source = self.get_data(self.path)
        header = importlib.util.MAGIC_NUMBER + _BY_HASH + importlib.util.source_hash(source)
        place = self.kept / os.path.dirname(os.path.abspath(self.path)).lstrip(os.sep) / os.path.basename(beside)
        found = _read(place, header)
        if found is not None:
            return found
        made: CodeType = self.source_to_code(source, self.path)
        # Without room on the disk, say, the next start compiles it again.
        with contextlib.suppress(OSError):
            _write(place, header + marshal.dumps(made))
        return made


def _read(place: Path, header: bytes) -> CodeType | None:
    """The code in a file that begins so; None if there is none."""
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        found = place.read_bytes()
        if found.startswith(header):
            code = marshal.loads(memoryview(found)[len(header) :])
            return code if isinstance(code, CodeType) else None
    return None


def _write(place: Path, data: bytes) -> None:
    """Write a file that only this user can read or write, whatever umask there is, all at once."""
    _make(place.parent)
    # Another process may be writing the same.
    descriptor, own = tempfile.mkstemp(dir=place.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(own, place)
    except OSError:
        os.unlink(own)
        raise


def _make(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def _is_missing() -> bool:
    """True if the library's bytecode is not there, and will not be."""
    try:
        found = importlib.util.find_spec(_LIBRARY)
    except (ImportError, ValueError):
        return False
    if found is None or found.cached is None or os.path.exists(found.cached):
        return False
    return sys.dont_write_bytecode or not os.access(os.path.dirname(os.path.dirname(found.cached)), os.W_OK)


def _is_ours(folder: Path) -> bool:
    """True if this folder, made if need be, can be written or exchanged for another by this user (and root) alone."""
    try:
        _make(folder)
        user = os.getuid()
        above = [path.stat() for path in folder.resolve().parents]
        found = folder.stat()
    except (OSError, AttributeError):
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_uid != user or found.st_mode & others or not os.access(folder, os.W_OK):
        return False
    # Where a folder is sticky, as /tmp is, only owners exchange what lies in it.
    return all(
        path.st_uid in (0, user) and (not path.st_mode & others or path.st_mode & stat.S_ISVTX) for path in above
    )
